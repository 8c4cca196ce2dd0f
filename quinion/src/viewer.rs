//! Viewer: a reader in another process than the owner's.
//!
//! A viewer maps the arena read-only and hits by the very code the owner's
//! threads use. What it cannot do itself, it asks for, through a page of its
//! own in the control file.
//!
//! ```text
//!   arena (read-only)                      control file (read-write)
//!     walk, check, copy, re-check  hit       ring      frames that were read
//!     |                                      requests  "make this range ready"
//!     v absent, filling                                      |  doorbell   ^ futex
//!     ask ---------------------------------------------------+------------>| owner
//!     look again
//! ```
//!
//! Nothing here takes a lock, allocates or needs the standard library, so a
//! signal handler may read while the code it interrupted was reading, and the
//! code runs inside any program. A request is a slot claimed by one atomic
//! step; thirty-two may be open at a time. While one is, its thread has its
//! signals held back: a handler may end the thread, or jump.
//!
//! Invariants:
//!  1. A viewer stores to its own page, to the doorbell, and nowhere else.
//!  2. A slot belongs to whoever moved it from FREE to CLAIMED, until that thread stores FREE. One given
//!     up while the owner may still be at work is never used again: a late answer must not look like
//!     the answer to a later question.
//!  3. Once the owner is gone it is never asked again; what is in the arena can still be read, and is not to be
//!     believed of a file that may change ([`Viewer::trust`]).
//!
//! Not an invariant: that the owner exists. Each wait ends, by an answer, by the owner's word that it
//! serves no more, or because its heart stood still for [`OWNER_QUIET_MILLIS_MAX`].

use core::cell::Cell;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::arena::control::{
    ABANDONED, ATTACHED_PLACES, Advice, Control, ControlView, Counter, Manners, Operation, Patching,
    REQUEST_SLOTS, RING_ENTRIES, Reason, Request, UNCACHED, ViewerPage, place_of, state,
};
use crate::arena::referenced::is_saturated;
use crate::arena::{CellNumber, Flags, Grown, LayoutError, Trust, View};
use crate::filemap::{Stopped, read_hits};
use crate::units::{Frame, MappingId};

pub mod sys;

use sys::SignalsHeld;

/// How long an owner may show no sign of life, in milliseconds, before a viewer that waits gives it up.
pub const OWNER_QUIET_MILLIS_MAX: u64 = 2000;
/// How long one sleep lasts at most, in milliseconds; then the heartbeat is looked at.
const SLEEP_MILLIS: u32 = 100;
/// How often a waiter looks before it sleeps: about the time the two system calls of a sleep take.
const SPINS: u32 = 400;
/// Slots that hints may take: who has to wait for bytes always finds one that no hint is in.
const HINT_SLOTS: usize = REQUEST_SLOTS / 2;
/// How often a read asks for the same page and finds it gone again before it gives up.
const FRUITLESS_MAX: u32 = 4;

/// A file that was mapped into this process: where, and how much of it.
#[derive(Clone, Copy, Debug)]
pub struct Mapped {
    /// Its first byte's address; aligned to a page.
    pub base: NonNull<u8>,
    /// Its bytes.
    pub bytes: u64,
}

/// Why a process cannot view a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttachError {
    /// The arena's header or the control file's is not one this code understands.
    Layout(LayoutError),
    /// The two files do not belong together, or not to the cache that was meant.
    Token,
    /// All [`VIEWERS_MAX`](crate::arena::control::VIEWERS_MAX) pages are taken.
    Full,
    /// The owner serves no more.
    Closed,
}

/// Why a question has no answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequestError {
    /// The owner says no, with this error number.
    Errno(i32),
    /// The owner has ended, or does not move.
    OwnerGone,
    /// All the viewer's [`REQUEST_SLOTS`] slots are in use.
    NoSlot,
    /// The owner made the bytes ready, and each time they were gone again before they were copied.
    Fruitless,
}

/// A file as a viewer knows it: the owner's answer to [`Operation::Attach`].
#[derive(Clone, Copy, Debug)]
pub struct ViewedFile<'a> {
    /// What the owner calls this attachment.
    pub handle: u64,
    /// Where the file's record is.
    pub cell: CellNumber,
    /// The mapping's number.
    pub id: MappingId,
    /// The page of the last readahead marker the owner was told of, plus one; 0 at first. A viewer cannot clear a
    /// marker, so it remembers.
    pub marker_told: &'a AtomicU64,
    /// Where the last read ended that was noted, in bytes; 0 at first. Who goes on there, in the middle of a folio,
    /// reads that one still.
    pub touched: &'a AtomicU64,
}

/// What a read gave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadOutcome {
    /// Bytes copied, from the start of the range on.
    pub bytes: usize,
    /// How often the owner was asked for bytes.
    pub asked: u32,
    /// Why it ended there.
    pub end: ReadEnd,
}

/// Why a read ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadEnd {
    /// All that was asked for was copied.
    Full,
    /// The file ends here, as far as the owner knew; its size in bytes then. Who wants to be sure asks the
    /// kernel and, if it says otherwise, [`Operation::Revalidate`].
    EndOfFile(u64),
    /// The record belongs to another file by now: attach again, or let the kernel read.
    Stale,
    /// The owner could not help.
    Failed(RequestError),
}

/// One process's view of a cache that another process owns.
#[derive(Debug)]
pub struct Viewer {
    arena: View,
    control: ControlView,
    number: usize,
    run: AtomicU64,
    gone: AtomicBool,
}

impl Viewer {
    /// Attaches process `process`, the caller's, to the cache in the two files. `token` is what the
    /// process was told of the cache it is meant to view.
    ///
    /// # Safety
    /// Both files stay mapped, as [`View::attach`] and [`ControlView::attach`] want them, as long as the viewer
    /// lives. The arena need not be writable.
    pub unsafe fn attach(
        arena: Mapped,
        control: Mapped,
        token: u64,
        process: u32,
    ) -> Result<Self, AttachError> {
        // SAFETY: handed on.
        let arena = unsafe { View::attach(arena.base, arena.bytes) }.map_err(AttachError::Layout)?;
        // SAFETY: handed on.
        let control =
            unsafe { ControlView::attach(control.base, control.bytes) }.map_err(AttachError::Layout)?;
        let theirs = [&arena.header().token, &control.control().token];
        if theirs.iter().any(|place| place.load(Ordering::Relaxed) != token) {
            return Err(AttachError::Token);
        }
        if control.control().closed.load(Ordering::Relaxed) != 0 {
            return Err(AttachError::Closed);
        }
        let number = claim_page(&control, process).ok_or(AttachError::Full)?;
        Ok(Self { arena, control, number, run: AtomicU64::new(0), gone: AtomicBool::new(false) })
    }

    /// The arena.
    pub fn arena(&self) -> &View {
        &self.arena
    }
    /// This viewer's page.
    #[inline]
    pub fn page(&self) -> &ViewerPage {
        self.control.viewer_page(self.number).expect("a claimed page exists")
    }
    /// What this viewer counts is of that run; see [`ViewerPage::run`]. Said when a page was claimed, before anything
    /// is counted there.
    pub fn count_for(&self, run: u64) {
        self.run.store(run, Ordering::Relaxed);
        self.page().run.store(run, Ordering::Relaxed);
    }
    /// The run that it counts for, 0 if none was said: for a child that claims a page of its own.
    pub fn run(&self) -> u64 {
        self.run.load(Ordering::Relaxed)
    }
    /// Whether the owner was given up.
    #[inline]
    pub fn owner_is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// When files are asked for.
    pub fn manners(&self) -> Manners {
        self.control.control().manners()
    }
    /// Whether the owner has taken the file over, or another that looks like it.
    pub fn is_taken(&self, device: u64, inode: u64) -> bool {
        self.control.control().is_taken(device, inode)
    }

    /// As [`Control::openings_before`](crate::arena::control::Control::openings_before).
    pub fn openings_before(&self, device: u64, inode: u64) -> u64 {
        self.control.control().openings_before(device, inode)
    }

    /// What has to be done before the next read of `file` believes what is cached. Looked at before the read begins;
    /// what becomes so while it is under way is of no concern to it.
    #[inline]
    pub fn trust(&self, file: &ViewedFile<'_>) -> Trust {
        if self.arena.owner_has_ended() {
            return Trust::Kernel; // nobody sees to it any more that records say what is so
        }
        // Before what is said: who sees a time sees what was said of files before that was promised. Acquire, partner:
        // `Shared::vouch`.
        let until = self.control.control().sure_until.load(Ordering::Acquire);
        let said = self.arena.record(file.cell).map_or(Trust::Kernel, |record| record.trust());
        // Its owner may have been stopped, and others at work since.
        if said == Trust::Sure && sys::ticks() >= until { Trust::Unheard } else { said }
    }

    /// Whether any file is attached, by any viewer.
    pub fn has_attached_files(&self) -> bool {
        self.control.control().attached_files.load(Ordering::Relaxed) != 0 // a hint: see `is_attached`
    }
    /// Whether a file is attached, by any viewer, or looks like one that is.
    pub fn is_attached(&self, device: u64, inode: u64) -> bool {
        !self.control.control().attached[place_of(device, inode, ATTACHED_PLACES)].is_zero()
    }

    /// Adds to a number of the report.
    #[inline]
    pub fn count(&self, counter: Counter, add: u64) {
        self.page().counters[counter as usize].fetch_add(add, Ordering::Relaxed);
    }
    /// Counts a file or descriptor that is left to the kernel.
    pub fn count_reason(&self, reason: Reason) {
        self.page().counters[Counter::FirstReason as usize + reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts what came of patching the process's C library. Once a process.
    pub fn count_patching(&self, outcome: Patching) {
        self.page().counters[Counter::FirstPatching as usize + outcome as usize]
            .fetch_add(1, Ordering::Relaxed);
    }

    /// Reads `len` bytes at `position` of `file` to `to`, asking the owner for what is not in the cache.
    ///
    /// May wait for the owner; see [`Viewer::request`].
    ///
    /// # Safety
    /// `to` is valid for `len` bytes of writes, by nobody else, and does not overlap the arena.
    #[inline]
    pub unsafe fn read(&self, file: &ViewedFile<'_>, position: u64, to: *mut u8, len: usize) -> ReadOutcome {
        // SAFETY: the caller's promise.
        let (bytes, stopped) = unsafe { self.read_cached(file, position, to, len) };
        match stopped {
            Stopped::Full => ReadOutcome { bytes, asked: 0, end: ReadEnd::Full },
            // SAFETY: as above.
            _ => unsafe { self.read_asking(file, position, to, len, bytes, stopped) },
        }
    }

    /// The same, taking only what is in the cache and waiting for nobody: `None` if its first byte is not. What is
    /// copied may end before `len` with [`ReadEnd::Full`], where the next byte is not in the cache.
    ///
    /// # Safety
    /// That of [`Viewer::read`].
    pub unsafe fn read_ready(
        &self,
        file: &ViewedFile<'_>,
        position: u64,
        to: *mut u8,
        len: usize,
    ) -> Option<ReadOutcome> {
        // SAFETY: the caller's promise.
        let (bytes, stopped) = unsafe { self.read_cached(file, position, to, len) };
        let end = match stopped {
            Stopped::Full => ReadEnd::Full,
            Stopped::EndOfFile(size) => ReadEnd::EndOfFile(size),
            Stopped::Stale => ReadEnd::Stale,
            Stopped::Absent | Stopped::Filling | Stopped::Writing if bytes > 0 => ReadEnd::Full,
            Stopped::Absent | Stopped::Filling | Stopped::Writing => return None,
        };
        Some(ReadOutcome { bytes, asked: 0, end })
    }

    /// As [`Viewer::read`], and what it brings into the cache does not stay there; what was cached before does, and is
    /// not noted as read.
    ///
    /// # Safety
    /// That of [`Viewer::read`].
    pub unsafe fn read_uncached(
        &self,
        file: &ViewedFile<'_>,
        position: u64,
        to: *mut u8,
        len: usize,
    ) -> ReadOutcome {
        let met = Cell::new(false);
        // SAFETY: the caller's promise, for each part of the range.
        let look = |at, to, len| unsafe { self.read_passing(file, at, to, len, &met) };
        let (bytes, stopped) = look(position, to, len);
        // SAFETY: the caller's promise.
        let outcome = unsafe { self.ask_on((file, UNCACHED), position, to, len, (bytes, stopped), look) };
        if outcome.asked > 0 || met.get() {
            self.suggest(file, Advice::Passed, position, outcome.bytes as u64);
        }
        outcome
    }

    /// Copies what the cache holds and notes nothing; `met` is set if some of it is to be dropped when it was read.
    ///
    /// # Safety
    /// That of [`Viewer::read`].
    unsafe fn read_passing(
        &self,
        file: &ViewedFile<'_>,
        position: u64,
        to: *mut u8,
        len: usize,
        met: &Cell<bool>,
    ) -> (usize, Stopped) {
        let touch = |grown: Grown<'_>, frame| {
            let leaves = grown.descriptor(frame).is_some_and(|folio| folio.word().has(Flags::DROPBEHIND));
            met.set(met.get() | leaves);
        };
        // SAFETY: the caller's promise.
        let hits = unsafe { read_hits(&self.arena, file.cell, file.id, position, to, len, touch) };
        if let Some(page) = hits.marker {
            self.tell_marker(file, page.0, UNCACHED);
        }
        (hits.bytes, hits.stopped)
    }

    /// Tells the owner how `len` bytes at `position` will be read, and waits until it has heard it. That it could not
    /// be told costs speed only. May wait as [`Viewer::request`] does.
    pub fn advise(&self, file: &ViewedFile<'_>, advice: Advice, position: u64, len: u64) {
        let _ = self.request(Operation::Hint, [file.handle, position, advice.with_length(len)]);
    }

    /// The same without waiting; forgotten if many questions are open.
    pub fn suggest(&self, file: &ViewedFile<'_>, advice: Advice, position: u64, len: u64) {
        let _held = SignalsHeld::new(); // as in `request`
        let question = [file.handle, position, advice.with_length(len)];
        let _ = self.submit(Operation::Hint, question, state::PENDING_UNATTENDED, HINT_SLOTS);
    }

    /// Copies what the cache holds, notes what was read, tells the owner of a marker.
    ///
    /// # Safety
    /// That of [`Viewer::read`].
    #[inline]
    unsafe fn read_cached(
        &self,
        file: &ViewedFile<'_>,
        position: u64,
        to: *mut u8,
        len: usize,
    ) -> (usize, Stopped) {
        let end = position.wrapping_add(len as u64); // a number to compare with
        let touch = |_: Grown<'_>, frame| self.note(file, frame, position, end);
        // SAFETY: the caller's promise.
        let hits = unsafe { read_hits(&self.arena, file.cell, file.id, position, to, len, touch) };
        if let Some(page) = hits.marker {
            self.tell_marker(file, page.0, 0);
        }
        (hits.bytes, hits.stopped)
    }

    /// The rest of a read whose first look did not give all.
    ///
    /// # Safety
    /// That of [`Viewer::read`].
    #[cold]
    unsafe fn read_asking(
        &self,
        file: &ViewedFile<'_>,
        position: u64,
        to: *mut u8,
        len: usize,
        bytes: usize,
        stopped: Stopped,
    ) -> ReadOutcome {
        // SAFETY: the caller's promise, for each part of the range.
        let look = |at, to, len| unsafe { self.read_cached(file, at, to, len) };
        // SAFETY: the caller's promise.
        unsafe { self.ask_on((file, 0), position, to, len, (bytes, stopped), look) }
    }

    /// Asks and looks again, by `look(position, to, len)`, until the range is whole or something ends it. The bits
    /// beside the file are added to the lengths that are asked for.
    ///
    /// # Safety
    /// That of [`Viewer::read`].
    unsafe fn ask_on(
        &self,
        (file, bits): (&ViewedFile<'_>, u64),
        position: u64,
        to: *mut u8,
        len: usize,
        (mut bytes, mut stopped): (usize, Stopped),
        look: impl Fn(u64, *mut u8, usize) -> (usize, Stopped),
    ) -> ReadOutcome {
        let (mut asked, mut fruitless) = (0, 0);
        let end = loop {
            match stopped {
                Stopped::Full => break ReadEnd::Full,
                Stopped::EndOfFile(size) => break ReadEnd::EndOfFile(size),
                Stopped::Stale => break ReadEnd::Stale,
                Stopped::Absent | Stopped::Filling | Stopped::Writing => {}
            }
            if fruitless == FRUITLESS_MAX {
                break ReadEnd::Failed(RequestError::Fruitless);
            }
            let (at, left) = (position + bytes as u64, len - bytes);
            asked += 1;
            self.count(Counter::Misses, 1);
            if let Err(error) = self.request(Operation::Fill, [file.handle, at, left as u64 | bits]) {
                break ReadEnd::Failed(error);
            }
            // SAFETY: `bytes < len`, or nothing would be missing.
            let (more, next) = look(at, unsafe { to.add(bytes) }, left);
            fruitless = if more == 0 { fruitless + 1 } else { 0 };
            (bytes, stopped) = (bytes + more, next);
        };
        ReadOutcome { bytes, asked, end }
    }

    /// Notes that the folio at `frame` was read, unless the owner has counted enough of that.
    #[inline]
    fn note(&self, file: &ViewedFile<'_>, frame: Frame, position: u64, end: u64) {
        let known =
            self.arena.referenced(frame).is_none_or(|byte| is_saturated(byte.load(Ordering::Relaxed)));
        if known {
            return;
        }
        let first = self.arena.descriptor(frame).map_or(0, |folio| folio.index().first_byte());
        let goes_on = file.touched.load(Ordering::Relaxed) == position && first < position;
        file.touched.store(end, Ordering::Relaxed);
        if !goes_on {
            let page = self.page();
            let place = page.ring_head.fetch_add(1, Ordering::Relaxed) as usize % RING_ENTRIES;
            page.ring[place].store(frame.0, Ordering::Relaxed);
        }
    }

    #[inline]
    fn tell_marker(&self, file: &ViewedFile<'_>, page: u64, bits: u64) {
        if file.marker_told.swap(page + 1, Ordering::Relaxed) != page + 1 {
            let _ = self.tell(Operation::Advance, [file.handle, page | bits, 0]); // a lost hint costs speed only
        }
    }

    /// Asks the owner and waits for its answer.
    ///
    /// Waits while the owner works. Ends with an error if the owner closed, or showed no sign of life for
    /// [`OWNER_QUIET_MILLIS_MAX`]. A signal that arrives meanwhile is handled afterwards, as during a read of the
    /// kernel's own: a handler that does not come back would take the slot with it.
    pub fn request(&self, operation: Operation, arguments: [u64; 3]) -> Result<[u64; 2], RequestError> {
        let _held = SignalsHeld::new();
        let slot = self.submit(operation, arguments, state::PENDING, REQUEST_SLOTS)?;
        self.wait(slot)?;
        let error = slot.error.load(Ordering::Relaxed);
        let answers = [slot.answers[0].load(Ordering::Relaxed), slot.answers[1].load(Ordering::Relaxed)];
        // Release, partner: the Acquire in `claim_slot`: who claims the slot next finds our reads done.
        slot.state.store(state::FREE, Ordering::Release);
        if error == 0 { Ok(answers) } else { Err(RequestError::Errno(error as i32)) }
    }

    /// Tells the owner something and does not wait.
    pub fn tell(&self, operation: Operation, arguments: [u64; 3]) -> Result<(), RequestError> {
        let _held = SignalsHeld::new(); // as in `request`
        self.submit(operation, arguments, state::PENDING_UNATTENDED, REQUEST_SLOTS).map(drop)
    }

    /// Writes a question into one of the first `slots` slots.
    fn submit(
        &self,
        operation: Operation,
        arguments: [u64; 3],
        pending: u32,
        slots: usize,
    ) -> Result<&Request, RequestError> {
        if self.owner_is_gone() {
            return Err(RequestError::OwnerGone);
        }
        let slot = self.claim_slot(slots).ok_or(RequestError::NoSlot)?;
        slot.operation.store(operation as u32, Ordering::Relaxed);
        for (place, argument) in slot.arguments.iter().zip(arguments) {
            place.store(argument, Ordering::Relaxed);
        }
        slot.error.store(0, Ordering::Relaxed);
        slot.sleeper.store(0, Ordering::Relaxed);
        // Release, partner: the Acquire by which the owner takes the slot: it sees the question.
        slot.state.store(pending, Ordering::Release);
        self.ring_doorbell();
        Ok(slot)
    }

    fn claim_slot(&self, slots: usize) -> Option<&Request> {
        self.page().requests[..slots].iter().find(|slot| {
            slot.state.load(Ordering::Relaxed) == state::FREE
                // Acquire, partner: the Release by which the slot became FREE, here or at the owner.
                && slot
                    .state
                    .compare_exchange(state::FREE, state::CLAIMED, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
        })
    }

    fn ring_doorbell(&self) {
        let control = self.control.control();
        // SeqCst on both, partner: the owner's worker, which adds to `sleepers` and then sleeps only if
        // the bell still has the value it saw before it looked for work. Either we see the sleeper, or its
        // sleep sees the bell.
        control.doorbell.fetch_add(1, Ordering::SeqCst);
        if control.sleepers.load(Ordering::SeqCst) != 0 {
            sys::futex_wake(&control.doorbell, 1);
        }
    }

    /// Waits until the answer stands.
    fn wait(&self, slot: &Request) -> Result<(), RequestError> {
        // Acquire, partner: the owner's store of DONE, which its answers precede.
        let done = || slot.state.load(Ordering::Acquire) == state::DONE;
        for _ in 0..SPINS {
            if done() {
                return Ok(());
            }
            core::hint::spin_loop();
        }
        // SeqCst, partner: the owner stores DONE and then looks for a sleeper. Either it sees this one and
        // wakes it, or the sleep below sees DONE.
        slot.sleeper.store(1, Ordering::SeqCst);
        let mut patience = Patience::new(self.control.control());
        loop {
            let now = slot.state.load(Ordering::Acquire); // as in `done`
            if now == state::DONE {
                return Ok(());
            }
            if patience.is_over() {
                // The owner may have answered just before it went.
                return if done() { Ok(()) } else { Err(self.give_up()) };
            }
            sys::futex_wait(&slot.state, now, SLEEP_MILLIS);
        }
    }

    fn give_up(&self) -> RequestError {
        self.gone.store(true, Ordering::Relaxed);
        RequestError::OwnerGone
    }
}

/// Takes a page that is nobody's. A page this process had before it became another program is handed
/// to the owner first.
fn claim_page(control: &ControlView, process: u32) -> Option<usize> {
    let places = &control.control().processes;
    for place in places {
        let left = process | ABANDONED;
        let _ = place.compare_exchange(process, left, Ordering::Relaxed, Ordering::Relaxed);
    }
    // Acquire, partner: the Release by which the owner gives a page free after clearing it.
    places
        .iter()
        .position(|place| place.compare_exchange(0, process, Ordering::Acquire, Ordering::Relaxed).is_ok())
}

/// How long a viewer goes on waiting for an owner that shows no sign of life.
struct Patience<'a> {
    control: &'a Control,
    beat: u32,
    looked: u64,
    quiet_millis: u64,
}

impl<'a> Patience<'a> {
    fn new(control: &'a Control) -> Self {
        let beat = control.heartbeat.load(Ordering::Relaxed);
        Self { control, beat, looked: sys::clock_millis(), quiet_millis: 0 }
    }
    /// Whether to give up. One step counts for little even if much time passed: then it was this process
    /// that stood still, stopped together with the owner, say.
    fn is_over(&mut self) -> bool {
        let now = sys::clock_millis();
        self.quiet_millis += (now - self.looked).min(2 * u64::from(SLEEP_MILLIS));
        self.looked = now;
        let beat = self.control.heartbeat.load(Ordering::Relaxed);
        if beat != self.beat {
            (self.beat, self.quiet_millis) = (beat, 0);
        }
        self.control.closed.load(Ordering::Relaxed) != 0 || self.quiet_millis >= OWNER_QUIET_MILLIS_MAX
    }
}

const _: () = assert!(REQUEST_SLOTS > 0 && RING_ENTRIES.is_power_of_two());
const _: () = assert!(size_of::<AtomicU32>() == 4, "a futex is 32 bits");

//! Viewer: a reader in another process than the owner's.
//!
//! A viewer maps the arena read-only and hits by the very code of the owner's threads. For everything else it sends
//! requests, through a page of its own in the control file.
//!
//! ```text
//!   arena (read-only)                      a page of its own (read-write)
//!     walk, check, copy, re-check  hit       ring      frames that were read
//!     |                                      requests  "make this range ready"
//!     v absent, filling                                      |  futex      ^ futex
//!     ask ---------------------------------------------------+------------>| owner
//!     look again; too late: the kernel reads
//! ```
//!
//! Nothing here takes a lock, allocates or needs the standard library: the code runs inside any program, and in a
//! signal handler that interrupted it. A request is a slot claimed by one atomic step. While it is open its thread
//! holds its signals back, as a handler may end the thread, or jump; requests that may take minutes are the exception
//! ([`Viewer::request_within`]).
//!
//! Invariants:
//!  1. A viewer stores to its own page only; no other is mapped writable.
//!  2. A slot belongs to the thread that moved it from FREE to CLAIMED, until that thread frees it, or gives it up
//!     while the owner is at work. The owner frees one given up and never answers into it: a late answer cannot look
//!     like the answer to a later request.
//!  3. Each wait for the owner ends after a bounded time: [`ANSWER_MILLIS_MAX`], unless the viewer was built with
//!     another bound. A viewer that waited in vain reads by the kernel.
//!  4. An owner that was late is not waited for again before its heartbeat has risen.
//!
//! Not an invariant: that the owner exists, or moves. Without it the arena can be read, but is not to be trusted for a
//! file that may change ([`Viewer::validation`]).

use core::cell::Cell;
use core::ops::Range;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::arena::control::{
    ATTACHED_PLACES, Advice, AttachPolicy, Counter, OPENED_ENTRIES, Operation, Patching, REQUEST_SLOTS,
    RING_ENTRIES, Reason, Request, UNCACHED, ViewerControl, ViewerPage, opening_of, place_of, state,
};
use crate::arena::referenced::is_saturated;
use crate::arena::{CellNumber, Flags, GrownView, LayoutError, Validation, View};
pub use crate::hit::WantedBytes;
use crate::hit::{FileView, HitStop, locate, read_hits, resident};
use crate::units::{FileId, Frame, MappingId};

pub mod handshake;
pub mod sys;

use handshake::ANY_CACHE;
use sys::SignalsHeld;

/// How long a viewer waits for an answer, in milliseconds: some times a slow disk's read. The kernel reads what takes
/// longer.
pub const ANSWER_MILLIS_MAX: u32 = 50;
/// How long a viewer waits for the answer to a request that takes its time, in milliseconds.
pub const LONG_MILLIS_MAX: u32 = 2000;
/// How long the heartbeat of a working owner stands still at most, in milliseconds: some beats.
const STILL_MILLIS_MAX: u64 = 300;
/// How often, in milliseconds, a waiter checks whether the owner still lives.
const CHECK_MILLIS: u32 = 100;
/// How often a waiter looks before it sleeps: about the time the two system calls of a sleep take.
const SPINS: u32 = 400;
/// Slots that hints may take: a viewer that has to wait for bytes always finds one that no hint is in.
const HINT_SLOTS: usize = REQUEST_SLOTS / 2;
/// How often a read asks for the same page and finds it gone again before it gives up.
const FRUITLESS_MAX: u32 = 4;

/// Where a file is mapped into this process.
#[derive(Clone, Copy, Debug)]
pub struct Mapped {
    /// The address of the first byte; aligned to a page.
    pub base: NonNull<u8>,
    /// The length in bytes.
    pub bytes: u64,
}

/// Why a process cannot view a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttachError {
    /// The arena's header or the control file's is not one this code understands.
    Layout(LayoutError),
    /// The two files do not belong together, or not to the cache that was meant.
    Token,
    /// The owner serves no more.
    Closed,
}

/// Why a request has no answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequestError {
    /// The owner says no, with this error number.
    Errno(i32),
    /// The owner has ended.
    OwnerDead,
    /// The owner did not answer in time, or has not moved since it last did not. Nothing was done, or it was undone.
    Late,
    /// All the viewer's [`REQUEST_SLOTS`] slots are in use.
    NoSlot,
    /// The owner made the bytes ready, and each time they were gone again before they were copied.
    Fruitless,
}

/// A file as a viewer knows it: the owner's answer to [`Operation::Attach`].
#[derive(Clone, Copy, Debug)]
pub struct ViewedFile<'a> {
    /// The owner's handle of this attachment.
    pub handle: u64,
    /// Where the file's record is.
    pub cell: CellNumber,
    /// The mapping's number.
    pub id: MappingId,
    /// The page of the last readahead marker reported to the owner, plus one; 0 at first. A viewer cannot clear a
    /// marker.
    pub marker_reported: &'a AtomicU64,
    /// Where the last noted read ended, in bytes; 0 at first. A read that goes on there within a folio is not noted
    /// again.
    pub touched: &'a AtomicU64,
}

/// The result of a read's first look.
#[derive(Debug)]
pub struct Hit {
    bytes: usize,
    stopped: HitStop,
    marker: Option<u64>,
}

impl Hit {
    /// How many bytes were copied, if they are all that was asked for, and there is nothing to tell the owner.
    #[inline]
    pub fn whole(&self) -> Option<usize> {
        (self.stopped == HitStop::Full && self.marker.is_none()).then_some(self.bytes)
    }
}

/// The result of a read.
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
    /// The file ends here, at this size as the owner last knew it. A caller that wants to be sure asks the kernel and,
    /// if it says otherwise, [`Operation::Revalidate`].
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
    control: ViewerControl,
    run: AtomicU64,
    answer_millis_max: u32,
    /// Whether the owner did not answer in time when its heartbeat was `late_at`.
    is_late: AtomicBool,
    late_at: AtomicU32,
    /// Until when its heartbeat would have risen again if it works, by [`sys::clock_millis`].
    late_until: AtomicU64,
}

impl Viewer {
    /// Attaches the calling process to the cache in these files: the arena, the control pages that all viewers see, and
    /// the page made for this process. `token` is the cache's, or [`ANY_CACHE`].
    ///
    /// # Safety
    /// All three stay mapped, as [`View::attach`] and [`ViewerControl::attach`] require, as long as the viewer lives.
    /// Only the page need be writable.
    pub unsafe fn attach(
        arena: Mapped,
        common: Mapped,
        page: Mapped,
        token: u64,
    ) -> Result<Self, AttachError> {
        // SAFETY: handed on.
        let arena = unsafe { View::attach(arena.base, arena.bytes) }.map_err(AttachError::Layout)?;
        let (common, page) = ((common.base, common.bytes), (page.base, page.bytes));
        // SAFETY: handed on.
        let control = unsafe { ViewerControl::attach(common, page) }.map_err(AttachError::Layout)?;
        let theirs = [&arena.header().token, &control.control().token];
        let token = if token == ANY_CACHE { theirs[0].load(Ordering::Relaxed) } else { token };
        if theirs.iter().any(|place| place.load(Ordering::Relaxed) != token) {
            return Err(AttachError::Token);
        }
        if control.control().closed.load(Ordering::Relaxed) != 0 {
            return Err(AttachError::Closed);
        }
        let (run, answer_millis_max) = (AtomicU64::new(0), ANSWER_MILLIS_MAX);
        let (is_late, late_at, late_until) = (AtomicBool::new(false), AtomicU32::new(0), AtomicU64::new(0));
        Ok(Self { arena, control, run, answer_millis_max, is_late, late_at, late_until })
    }

    /// Makes the viewer wait up to `millis` milliseconds for an answer.
    #[must_use]
    pub fn waiting_at_most(mut self, millis: u32) -> Self {
        self.answer_millis_max = millis;
        self
    }

    /// How long it waits for any answer at most, in milliseconds.
    pub fn waits_at_most(&self) -> u32 {
        LONG_MILLIS_MAX.max(self.answer_millis_max)
    }

    /// The token in the cache's files.
    pub fn token(&self) -> u64 {
        self.arena.header().token.load(Ordering::Relaxed)
    }

    /// The arena.
    pub fn arena(&self) -> &View {
        &self.arena
    }
    /// The page of this viewer.
    #[inline]
    pub fn page(&self) -> &ViewerPage {
        self.control.page()
    }
    /// Counts for that run from now on; see [`ViewerPage::run`]. Called before anything is counted.
    pub fn count_for(&self, run: u64) {
        self.run.store(run, Ordering::Relaxed);
        self.page().run.store(run, Ordering::Relaxed);
    }
    /// The run that it counts for, 0 for none; a child that becomes a viewer takes it over.
    pub fn run(&self) -> u64 {
        self.run.load(Ordering::Relaxed)
    }
    /// Whether the owner serves no more, however it ended.
    pub fn owner_is_dead(&self) -> bool {
        self.control.control().closed.load(Ordering::Relaxed) != 0 || self.arena.owner_has_ended()
    }

    /// When files are asked for.
    pub fn attach_policy(&self) -> AttachPolicy {
        self.control.control().attach_policy()
    }
    /// Whether the owner has taken the file over, or another that looks like it.
    pub fn is_taken(&self, id: FileId) -> bool {
        self.control.control().is_taken(id)
    }

    /// Counts an opening of a large file by this process; how many are known from before, by any viewer, up to 255.
    pub fn openings_before(&self, id: FileId) -> u64 {
        let (page, hash) = (self.page(), opening_of(id));
        let known = self.control.control().openings(id);
        // Openings that the owner has not added up yet. It may do so between the two looks: then some count twice.
        let (head, tail) =
            (page.opened_head.load(Ordering::Relaxed), page.opened_tail.load(Ordering::Relaxed));
        let pending = head.wrapping_sub(tail).min(OPENED_ENTRIES as u32);
        let entry = |back: u32| &page.opened[head.wrapping_sub(back) as usize % OPENED_ENTRIES];
        let ours = (1..=pending).filter(|&back| entry(back).load(Ordering::Relaxed) == hash).count();
        let place = page.opened_head.fetch_add(1, Ordering::Relaxed) as usize % OPENED_ENTRIES;
        page.opened[place].store(hash, Ordering::Relaxed);
        (known + ours as u64).min(255)
    }

    /// The validation that is due before the next read of `file` trusts cached pages. A change during that read does
    /// not matter.
    #[inline]
    pub fn validation(&self, file: &ViewedFile<'_>) -> Validation {
        if self.arena.owner_has_ended() {
            return Validation::Kernel; // records are no longer kept true
        }
        // Before the times: a viewer that sees a deadline sees the records as they were before it. Acquire, partner:
        // `Shared::publish_lease_deadline`.
        let until = self.control.control().leases_valid_until.load(Ordering::Acquire);
        let said = self.arena.record(file.cell).map_or(Validation::Kernel, |record| record.validation());
        // The owner may have been stopped, and others at work since.
        if said == Validation::Leased && sys::ticks() >= until { Validation::OwnerLate } else { said }
    }

    /// Whether any file is attached, by any viewer.
    pub fn has_attached_files(&self) -> bool {
        self.control.control().attached_files.load(Ordering::Relaxed) != 0 // a hint: see `is_attached`
    }
    /// Whether a file is attached, by any viewer, or looks like one that is.
    pub fn is_attached(&self, id: FileId) -> bool {
        !self.control.control().attached[place_of(id, ATTACHED_PLACES)].is_zero()
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

    /// Says that this process is about to become another program, which may not join: the owner looks some time later
    /// whether it has, and takes back what this one had. [`Viewer::end_exec`] must follow if it has not.
    pub fn begin_exec(&self) {
        self.page().counters[Counter::Execs as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Says that this process is the same program still.
    pub fn end_exec(&self) {
        let execs = &self.page().counters[Counter::Execs as usize];
        // Another page may be in its place by now.
        let _ = execs.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_sub(1));
    }

    /// Counts the outcome of patching the process's C library. Once a process.
    pub fn count_patching(&self, outcome: Patching) {
        self.page().counters[Counter::FirstPatching as usize + outcome as usize]
            .fetch_add(1, Ordering::Relaxed);
    }

    /// Reads the wanted bytes of `file`, asking the owner for those that are not in the cache. May wait; see
    /// [`Viewer::request`].
    ///
    /// # Safety
    /// `wanted.to` is valid for `wanted.len` bytes of writes, by no other thread, and does not overlap the arena.
    #[inline]
    pub unsafe fn read(&self, file: &ViewedFile<'_>, wanted: WantedBytes) -> ReadOutcome {
        // SAFETY: the caller's promise.
        let hit = unsafe { self.read_hit(file, wanted) };
        match hit.whole() {
            Some(bytes) => ReadOutcome { bytes, asked: 0, end: ReadEnd::Full },
            // SAFETY: as above.
            None => unsafe { self.continue_read(file, wanted, hit) },
        }
    }

    /// The first look of a read, without a system call. If it was not all of it, [`Viewer::continue_read`] is next.
    ///
    /// # Safety
    /// That of [`Viewer::read`].
    #[inline]
    pub unsafe fn read_hit(&self, file: &ViewedFile<'_>, wanted: WantedBytes) -> Hit {
        let WantedBytes { position, len, .. } = wanted;
        let end = position.wrapping_add(len as u64); // a number to compare with
        let touch = move |_: GrownView<'_>, frame| self.note(file, frame, position, end);
        // SAFETY: the caller's promise.
        let hits = unsafe { read_hits(self.view_of(file), wanted, touch) };
        Hit { bytes: hits.bytes, stopped: hits.stopped, marker: hits.marker.map(|page| page.0) }
    }

    /// The rest after a first look at the same range: tells the owner of a marker, and asks for what is missing.
    ///
    /// # Safety
    /// That of [`Viewer::read`].
    #[cold]
    pub unsafe fn continue_read(&self, file: &ViewedFile<'_>, wanted: WantedBytes, hit: Hit) -> ReadOutcome {
        if let Some(page) = hit.marker {
            self.notify_marker(file, page, 0);
        }
        match hit.stopped {
            HitStop::Full => ReadOutcome { bytes: hit.bytes, asked: 0, end: ReadEnd::Full },
            // SAFETY: the caller's promise.
            _ => unsafe { self.read_asking(file, wanted, hit) },
        }
    }

    /// [`Viewer::read`] of cached bytes only, without waiting: `None` if the first byte is not cached. The copy may
    /// end before the last with [`ReadEnd::Full`], where the next byte is not in the cache.
    ///
    /// # Safety
    /// That of [`Viewer::read`].
    pub unsafe fn read_ready(&self, file: &ViewedFile<'_>, wanted: WantedBytes) -> Option<ReadOutcome> {
        // SAFETY: the caller's promise.
        let (bytes, stopped) = unsafe { self.read_cached(file, wanted) };
        let end = match stopped {
            HitStop::Full => ReadEnd::Full,
            HitStop::EndOfFile(size) => ReadEnd::EndOfFile(size),
            HitStop::Stale => ReadEnd::Stale,
            HitStop::Absent | HitStop::Filling | HitStop::Writing if bytes > 0 => ReadEnd::Full,
            HitStop::Absent | HitStop::Filling | HitStop::Writing => return None,
        };
        Some(ReadOutcome { bytes, asked: 0, end })
    }

    /// As [`Viewer::read_ready`], into a slice. (No slice overlaps the arena but those that a pin lends, which are
    /// read-only.)
    #[inline]
    pub fn read_ready_into(
        &self,
        file: &ViewedFile<'_>,
        position: u64,
        to: &mut [u8],
    ) -> Option<ReadOutcome> {
        // SAFETY: a unique slice is valid for writes of its length by no other thread.
        unsafe { self.read_ready(file, WantedBytes::of_slice(position, to)) }
    }

    /// Where the bytes `range` lie that the owner has pinned for this viewer, of a file that never changes; see
    /// [`locate`].
    pub fn locate(
        &self,
        file: &ViewedFile<'_>,
        range: Range<u64>,
        each: impl FnMut(*const u8, usize),
    ) -> usize {
        locate(self.view_of(file), range, each)
    }

    /// Which bytes of `range` a read would find in the cache now, as a hint; see [`resident`]. The owner is not asked.
    pub fn resident(&self, file: &ViewedFile<'_>, range: Range<u64>, each: impl FnMut(Range<u64>)) {
        resident(self.view_of(file), range, each);
    }

    /// As [`Viewer::read`], but pages that it brings into the cache do not stay there; cached ones stay, not noted as
    /// read.
    ///
    /// # Safety
    /// That of [`Viewer::read`].
    pub unsafe fn read_uncached(&self, file: &ViewedFile<'_>, wanted: WantedBytes) -> ReadOutcome {
        let met = Cell::new(false);
        // SAFETY: the caller's promise, for each part of the range.
        let read = |wanted| unsafe { self.read_passing(file, wanted, &met) };
        let first = read(wanted);
        // SAFETY: the caller's promise.
        let outcome = unsafe { self.ask_on((file, UNCACHED), wanted, first, read) };
        if outcome.asked > 0 || met.get() {
            self.suggest(file, Advice::Passed, wanted.position, outcome.bytes as u64);
        }
        outcome
    }

    #[inline(always)]
    fn view_of(&self, file: &ViewedFile<'_>) -> FileView<'_> {
        FileView { view: &self.arena, cell: file.cell, id: file.id }
    }

    /// Copies the bytes that the cache holds and notes nothing; sets `met` if some of it is dropped after the read.
    ///
    /// # Safety
    /// That of [`Viewer::read`].
    unsafe fn read_passing(
        &self,
        file: &ViewedFile<'_>,
        wanted: WantedBytes,
        met: &Cell<bool>,
    ) -> (usize, HitStop) {
        let touch = |grown: GrownView<'_>, frame| {
            let leaves = grown.descriptor(frame).is_some_and(|folio| folio.word().has(Flags::DROPBEHIND));
            met.set(met.get() | leaves);
        };
        // SAFETY: the caller's promise.
        let hits = unsafe { read_hits(self.view_of(file), wanted, touch) };
        if let Some(page) = hits.marker {
            self.notify_marker(file, page.0, UNCACHED);
        }
        (hits.bytes, hits.stopped)
    }

    /// Tells the owner how `len` bytes at `position` will be read, and waits as [`Viewer::request`] does. A failure
    /// costs speed only.
    pub fn advise(&self, file: &ViewedFile<'_>, advice: Advice, position: u64, len: u64) {
        let _ = self.request(Operation::Hint, [file.handle, position, advice.with_length(len)]);
    }

    /// As [`Viewer::advise`] without waiting; dropped if many requests are open.
    pub fn suggest(&self, file: &ViewedFile<'_>, advice: Advice, position: u64, len: u64) {
        let _held = SignalsHeld::new(); // as in `request`
        let arguments = [file.handle, position, advice.with_length(len)];
        let _ = self.submit(Operation::Hint, arguments, state::PENDING_UNATTENDED, HINT_SLOTS);
    }

    /// Copies the bytes that the cache holds, notes them as read, tells the owner of a marker.
    ///
    /// # Safety
    /// That of [`Viewer::read`].
    #[inline]
    unsafe fn read_cached(&self, file: &ViewedFile<'_>, wanted: WantedBytes) -> (usize, HitStop) {
        // SAFETY: the caller's promise.
        let hit = unsafe { self.read_hit(file, wanted) };
        if let Some(page) = hit.marker {
            self.notify_marker(file, page, 0);
        }
        (hit.bytes, hit.stopped)
    }

    /// The rest of a read whose first look did not give all.
    ///
    /// # Safety
    /// That of [`Viewer::read`].
    #[cold]
    unsafe fn read_asking(&self, file: &ViewedFile<'_>, wanted: WantedBytes, hit: Hit) -> ReadOutcome {
        // SAFETY: the caller's promise, for each part of the range.
        let read = |wanted| unsafe { self.read_cached(file, wanted) };
        // SAFETY: the caller's promise.
        unsafe { self.ask_on((file, 0), wanted, (hit.bytes, hit.stopped), read) }
    }

    /// Asks and looks again, by `read`, until the wanted bytes are there or something ends it. The bits beside the file
    /// are added to the lengths that are asked for.
    ///
    /// # Safety
    /// That of [`Viewer::read`].
    unsafe fn ask_on(
        &self,
        (file, bits): (&ViewedFile<'_>, u64),
        WantedBytes { position, to, len }: WantedBytes,
        (mut bytes, mut stopped): (usize, HitStop),
        read: impl Fn(WantedBytes) -> (usize, HitStop),
    ) -> ReadOutcome {
        let (mut asked, mut fruitless) = (0, 0);
        let end = loop {
            match stopped {
                HitStop::Full => break ReadEnd::Full,
                HitStop::EndOfFile(size) => break ReadEnd::EndOfFile(size),
                HitStop::Stale => break ReadEnd::Stale,
                HitStop::Absent | HitStop::Filling | HitStop::Writing => {}
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
            let rest = WantedBytes { position: at, to: unsafe { to.add(bytes) }, len: left };
            let (more, next) = read(rest);
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
        let is_sequential = file.touched.load(Ordering::Relaxed) == position && first < position;
        file.touched.store(end, Ordering::Relaxed);
        if !is_sequential {
            let page = self.page();
            let place = page.ring_head.fetch_add(1, Ordering::Relaxed) as usize % RING_ENTRIES;
            page.ring[place].store(frame.0, Ordering::Relaxed);
        }
    }

    #[inline]
    fn notify_marker(&self, file: &ViewedFile<'_>, page: u64, bits: u64) {
        if file.marker_reported.swap(page + 1, Ordering::Relaxed) != page + 1 {
            let _ = self.notify(Operation::Advance, [file.handle, page | bits, 0]); // a lost hint costs speed only
        }
    }

    /// Asks the owner and waits for its answer, for a bounded time.
    ///
    /// Ends with [`RequestError::Late`] if there is none by then; the owner then does not do the request, or undoes it.
    /// Ends so at once if the owner has shown no sign of life since an answer was late. Signals are handled afterwards,
    /// as during a kernel's read: a handler that does not return would take the slot with it.
    pub fn request(&self, operation: Operation, arguments: [u64; 3]) -> Result<[u64; 2], RequestError> {
        let _held = SignalsHeld::new();
        self.ask(operation, arguments, self.answer_millis_max)
    }

    /// As [`Viewer::request`], of a long request: waits up to [`LONG_MILLIS_MAX`] while the owner's heartbeat rises.
    /// Waits for the heartbeat of an owner that was late, so that one slow read does not suppress the request.
    pub fn request_long(&self, operation: Operation, arguments: [u64; 3]) -> Result<[u64; 2], RequestError> {
        let _held = SignalsHeld::new();
        self.wait_for_heartbeat();
        self.ask(operation, arguments, self.waits_at_most())
    }

    /// As [`Viewer::request`], waiting up to `millis` milliseconds while the owner's heartbeat rises, for what only the
    /// owner can answer, such as the bytes of an object.
    ///
    /// Signals are handled at once, so a wait for a slow store can be interrupted. A handler that does not return takes
    /// the slot with it.
    pub fn request_within(
        &self,
        operation: Operation,
        arguments: [u64; 3],
        millis: u32,
    ) -> Result<[u64; 2], RequestError> {
        self.ask(operation, arguments, millis)
    }

    fn ask(&self, operation: Operation, arguments: [u64; 3], millis: u32) -> Result<[u64; 2], RequestError> {
        let slot = self.submit(operation, arguments, state::PENDING, REQUEST_SLOTS)?;
        self.wait(slot, millis)?;
        let error = slot.error.load(Ordering::Relaxed);
        let answers = [slot.answers[0].load(Ordering::Relaxed), slot.answers[1].load(Ordering::Relaxed)];
        // Release, partner: the Acquire in `claim_slot`: a viewer that claims the slot next finds these reads done.
        slot.state.store(state::FREE, Ordering::Release);
        if error == 0 { Ok(answers) } else { Err(RequestError::Errno(error as i32)) }
    }

    /// Tells the owner something and does not wait.
    pub fn notify(&self, operation: Operation, arguments: [u64; 3]) -> Result<(), RequestError> {
        let _held = SignalsHeld::new(); // as in `request`
        self.submit(operation, arguments, state::PENDING_UNATTENDED, REQUEST_SLOTS).map(drop)
    }

    /// Posts a message for a late owner to handle when it runs again. Lost if no slot is free.
    pub fn post_late(&self, operation: Operation, arguments: [u64; 3]) {
        let _held = SignalsHeld::new(); // as in `request`
        let _ = self.post(operation, arguments, state::PENDING_UNATTENDED, REQUEST_SLOTS);
    }

    /// Waits until the owner has handled all that it was told, `millis` milliseconds at most. If its heartbeat stands
    /// still it gets some beats longer, then counts as late.
    pub fn settle(&self, millis: u32) {
        self.wait_for_heartbeat();
        let (begun, beat) = (sys::clock_millis(), self.heartbeat());
        let (until, still) = (begun + u64::from(millis), begun + self.heartbeat_timeout_millis());
        // Acquire, partner: the Release by which the owner frees a slot: the request in it is done.
        let is_free = |slot: &Request| slot.state.load(Ordering::Acquire) == state::FREE;
        for slot in &self.page().requests {
            while !is_free(slot) && !self.owner_is_dead() && !self.is_late_still() {
                let (now, beats) = (sys::clock_millis(), self.heartbeat() != beat);
                if beats && now >= until {
                    return;
                }
                if !beats && now >= still {
                    return self.note_late(still);
                }
                // A thread that waits without a request is not woken.
                sys::futex_wait(&slot.state, slot.state.load(Ordering::Relaxed), 1);
            }
        }
    }

    /// After how many milliseconds without a beat an owner counts as late.
    fn heartbeat_timeout_millis(&self) -> u64 {
        STILL_MILLIS_MAX.max(u64::from(self.answer_millis_max))
    }

    /// The owner's heartbeat count.
    pub fn heartbeat(&self) -> u32 {
        self.control.control().heartbeat.load(Ordering::Relaxed)
    }

    /// Marks the owner late until its heartbeat rises; a working owner's does so by `still`.
    fn note_late(&self, still: u64) {
        self.late_until.store(still, Ordering::Relaxed);
        self.late_at.store(self.heartbeat(), Ordering::Relaxed);
        self.is_late.store(true, Ordering::Relaxed); // a hint, as is the number: each is looked at anew
    }

    fn wait_for_heartbeat(&self) {
        let is_waited_for = || sys::clock_millis() < self.late_until.load(Ordering::Relaxed);
        while self.is_late_still() && is_waited_for() && !self.owner_is_dead() {
            let word = &self.page().requests[0].state; // a beat wakes no thread
            sys::futex_wait(word, word.load(Ordering::Relaxed), 1);
        }
    }

    fn is_late_still(&self) -> bool {
        if !self.is_late.load(Ordering::Relaxed) {
            return false;
        }
        let is_still = self.heartbeat() == self.late_at.load(Ordering::Relaxed);
        if !is_still {
            self.is_late.store(false, Ordering::Relaxed);
        }
        is_still
    }

    fn submit(
        &self,
        operation: Operation,
        arguments: [u64; 3],
        pending: u32,
        slots: usize,
    ) -> Result<&Request, RequestError> {
        if self.owner_is_dead() {
            return Err(RequestError::OwnerDead);
        }
        if self.is_late_still() {
            return Err(RequestError::Late);
        }
        self.post(operation, arguments, pending, slots)
    }

    /// As [`Self::submit`], whether or not the owner is late.
    fn post(
        &self,
        operation: Operation,
        arguments: [u64; 3],
        pending: u32,
        slots: usize,
    ) -> Result<&Request, RequestError> {
        let slot = self.claim_slot(slots).ok_or(RequestError::NoSlot)?;
        slot.operation.store(operation as u32, Ordering::Relaxed);
        for (place, argument) in slot.arguments.iter().zip(arguments) {
            place.store(argument, Ordering::Relaxed);
        }
        slot.error.store(0, Ordering::Relaxed);
        slot.sleeper.store(0, Ordering::Relaxed);
        // Release, partner: the Acquire by which the owner takes the slot: it sees the request.
        slot.state.store(pending, Ordering::Release);
        self.wake_owner();
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

    fn wake_owner(&self) {
        let request_futex = &self.page().request_futex;
        // SeqCst on both, partner: the owner's worker, which adds to `sleepers` and then sleeps only if the futexes
        // still have the values from before its look for work. Either this thread sees the sleeper, or its sleep sees
        // the new value.
        request_futex.fetch_add(1, Ordering::SeqCst);
        if self.control.control().sleepers.load(Ordering::SeqCst) != 0 {
            sys::futex_wake(request_futex, 1);
        }
    }

    /// Waits until the answer stands, or for `millis` milliseconds, or until the heartbeat has stood still for some
    /// beats; then gives the slot up.
    fn wait(&self, slot: &Request, millis: u32) -> Result<(), RequestError> {
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
        let heartbeat = &self.control.control().heartbeat;
        let (mut beat, begun) = (heartbeat.load(Ordering::Relaxed), sys::clock_millis());
        let (until, mut still) = (begun + u64::from(millis), begun + self.heartbeat_timeout_millis());
        loop {
            let now = slot.state.load(Ordering::Acquire); // partner: as in `done`
            if now == state::DONE {
                return Ok(());
            }
            // Only this thread frees it: so the page was given back and zeros are in its place. No thread would wake
            // this one.
            if now == state::FREE {
                return Err(RequestError::OwnerDead);
            }
            let time = sys::clock_millis();
            let beats = heartbeat.load(Ordering::Relaxed);
            if beats != beat {
                (beat, still) = (beats, time + self.heartbeat_timeout_millis());
            }
            let left = until.min(still).saturating_sub(time).min(u64::from(u32::MAX)) as u32;
            let is_dead = self.owner_is_dead();
            if left == 0 || is_dead {
                let error = if is_dead { RequestError::OwnerDead } else { RequestError::Late };
                return self.give_up(slot, error, still);
            }
            // An owner that ends wakes all sleepers, unless it was killed: hence the checks.
            sys::futex_wait(&slot.state, now, left.min(CHECK_MILLIS));
        }
    }

    fn give_up(&self, slot: &Request, error: RequestError, still: u64) -> Result<(), RequestError> {
        let to = |from, to| {
            // Release, partner: the Acquire of a viewer that claims the slot next, or of the owner that takes its
            // answer back. Acquire on failure, partner: the owner's store of DONE.
            slot.state.compare_exchange(from, to, Ordering::Release, Ordering::Acquire)
        };
        let given_up = to(state::PENDING, state::FREE).or_else(|_| to(state::TAKEN, state::GIVEN_UP));
        if given_up == Err(state::DONE) {
            return Ok(());
        }
        if error == RequestError::Late {
            self.note_late(still);
        }
        Err(error)
    }
}

const _: () = assert!(REQUEST_SLOTS > 0 && RING_ENTRIES.is_power_of_two());
const _: () = assert!(size_of::<AtomicU32>() == 4, "a futex is 32 bits");

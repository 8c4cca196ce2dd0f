//! VM: one virtual machine that is served: what its userfaultfd says, and the answers.
//!
//! ```text
//!   a round     1 read      what can be read now, a thousand messages at most
//!               2 note      the events of it, in their order: given back, unmapped, moved, forked
//!               3 start     the reads of all faults that wait, if there are several
//!               4 answer    each fault that waits, by its page alone: supply, zeros, or wake
//!                             refused, the memory is changing --> it waits for the next round
//!               5 beside    what lies around each page that was answered, as far as it is there
//!   no fault    6 ahead     a piece of what is supplied unasked: what is still absent of it
//! ```
//!
//! **The wanted page first.** An answer is the page that a thread waits for, and nothing else: the thread runs on while
//! its neighbours are supplied. The reads of all of them were started before, as one. The page is pinned, or copied
//! from the kernel's cache; then the snapshot is checked, and the kernel given the bytes. Pages of zeros are not copied
//! but asked for. An unreadable page is poisoned. Neighbours are supplied only when they have come.
//!
//! **Crowds.** When faults have brought half of some 2 MiB of the image, the rest of them is supplied unasked, in large
//! pieces: a VM that touches pages here and there in all of its memory makes half of the faults then, and one that
//! touches few pages gets no more of them.
//!
//! While a record is **replayed**, a page that it names is answered alone, too: the record names what will be wanted
//! around it, and the rest would take the time from it.
//!
//! **Unasked**, in this order: the windows of streams (`streams`) and crowds, the record (`replay`), and, if all is to
//! be filled, the rest from its beginning. Each step is [`AHEAD_BYTES`] at most, and between two of them the faults are
//! looked for. If the last fault was in a stream, or of the record, or of what is filled next, the VM is right behind,
//! and to look for each of its faults would hold up both: steps are [`AHEAD_BYTES_MAX`] then. A step waits for no
//! device: what has not come is looked for again in a moment. (Except what was evicted three times before it could be
//! supplied, and any step of an image that VMs map: it is read as one, if it was not read before.) A turn of a VM whose
//! faults never end has such a step after each of them.
//!
//! While the order of pages is **recorded**, each page is answered alone, and nothing comes unasked but a replayed
//! record: a page that was never touched must not look as if it had been.
//!
//! A VM that has mapped the **image** needs no bytes: its pages are made resident in the image, and mapped, with what
//! is resident around them. Memory that it gives back shows the image again, as any private mapping of a file does; a
//! VMM that wants zeros there maps something else over it.
//!
//! A VM may be forked: the child has the same regions, what was supplied so far, and a userfaultfd of its own, a
//! **space**. All of a VM's spaces are served together, until the process that connected is no more.
//!
//! One worker at a time has a VM, so only the record is locked here, for a moment.
//!
//! Not an invariant: that a fault's address is in a region still. It may have been unmapped; the woken thread finds
//! that out. Only if it comes back again and again, something is wrong.

use std::collections::VecDeque;
use std::ops::{ControlFlow, Range};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::uffd::{CopyResult, CopyStop, Fault, FaultKind, MESSAGES_MAX, Message, MessageBuffer, Uffd};
use quinion::Pinned;
use quinion::internals::units::PAGE_SIZE;
use quinion::{Error, ErrorKind, File, Image, ReadOptions};

use super::fault_record::{RecordedPage, Recorder, digest};
use super::pages::{ImagePart, PageNeed, Pages};
use super::replay::{Replay, ReplayCursor};
use super::snapshot::Snapshot;
use super::stats::RestoreCounters;
use super::streams::{ReadaheadLimits, StreamStep, Streams, WINDOW_BYTES_MAX};
use super::{Event, Fill, PeerError};

/// Rounds in one turn, so that other VMs have theirs.
const ROUNDS_MAX: usize = 16;
/// How often the descriptor is read in one round, so that a round ends.
const READS_MAX: usize = 16;
/// Faults that wait at a time: each is a thread's, but a thread that wakes its threads itself could go on without end.
const WAITING_MAX: usize = 1 << 16;
/// A VM's address spaces: its own, and those of its forks that live.
pub(super) const SPACES_MAX: usize = 8;
/// Bytes that are supplied ahead between two looks for faults.
const AHEAD_BYTES: u64 = 128 << 10;
/// The same, when the VM waits for just that. A fault of anything else waits for such a step once.
const AHEAD_BYTES_MAX: u64 = 512 << 10;
/// In one turn, in [`AHEAD_BYTES`].
const AHEAD_STEPS: u64 = 4;
const AHEAD_RUNS: usize = 64;
/// How far before what is supplied unasked the snapshot is read, in bytes. A fault's own read waits behind them.
const WARM_BYTES: u64 = 8 << 20;
/// Windows of streams, and neighbours that had not come, that wait to be supplied. Older ones are left to their faults.
const WINDOWS_MAX: usize = 8;
/// The size of a neighbourhood in the image, and how much of it is absent at most when the rest is supplied ahead.
const CROWD_BYTES: u64 = 2 << 20;
const CROWD_ABSENT_MAX: u64 = CROWD_BYTES / 2;
/// How often what is supplied unasked may be found absent before it is waited for.
const ABSENCES_MAX: u32 = 3;
/// Faults in no region in a row that are taken for memory that was unmapped meanwhile.
const STRAYS_MAX: u32 = 256;
/// How often one fault may find no memory for its page.
const SHORTAGES_MAX: u32 = 5000;
/// No thread waits for a page.
const NO_PAGE: u64 = u64::MAX;
const PAGE: u64 = PAGE_SIZE as u64;

/// Bytes that are mapped at a time, where they are resident anyway.
const MAPPED_BYTES: u64 = 512 << 10;

#[derive(Debug)]
pub(super) enum Source {
    /// The snapshot's bytes are copied.
    Copied(Box<File>),
    /// The image's memory is mapped.
    Mapped(Image),
}

pub(super) struct VmShared<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) run_bytes: u64,
    pub(super) recorder: Option<&'a Mutex<Recorder>>,
    pub(super) replay: Option<&'a Replay>,
    pub(super) fill: Fill,
    /// How far reads may run ahead of a VM that walks through its memory.
    pub(super) reach_bytes: u64,
    pub(super) tell: &'a dyn Fn(&Event),
}

impl VmShared<'_> {
    fn note<'b>(&self, mut offset: u64, chunks: impl Iterator<Item = &'b [u8]>) {
        if let Some(recorder) = self.recorder {
            let mut recorder = recorder.lock().unwrap_or_else(PoisonError::into_inner);
            for chunk in chunks {
                recorder.note(offset, chunk);
                offset += chunk.len() as u64;
            }
        }
    }

    fn note_pages(&self, pages: impl Iterator<Item = RecordedPage>) {
        if let Some(recorder) = self.recorder {
            let mut recorder = recorder.lock().unwrap_or_else(PoisonError::into_inner);
            pages.for_each(|page| recorder.add(page));
        }
    }

    fn replayed(&self) -> Option<&Replay> {
        self.replay.filter(|_| self.fill != Fill::Nothing)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NextWait {
    /// To be called when its descriptor has something to say.
    Wait,
    /// Another turn soon: something was refused for the moment.
    Soon,
    /// Another turn when no other VM wants one: there is more to supply ahead.
    Ahead,
    /// Nothing: its process is no more.
    Over,
}

#[derive(Debug)]
pub(super) struct Vm {
    spaces: Vec<Space>,
    source: Source,
    inbox: MessageBuffer,
    streams: Streams,
    windows: VecDeque<Range<u64>>,
    /// Bytes that one step supplies ahead.
    ahead_bytes: u64,
    replayed: ReplayCursor,
    /// Up to where the image was filled, and read for that.
    filled: u64,
    fill_read: u64,
    absences: u32,
    buffer: Vec<u8>,
    counters: Arc<Mutex<RestoreCounters>>,
    strays: u32,
    shortages: u32,
    is_short: bool,
    ended: Vec<Space>,
}

#[derive(Debug)]
pub(super) struct Space {
    pub(super) uffd: Uffd,
    pub(super) is_watched: bool,
    pages: Pages,
    waiting: VecDeque<PendingFault>,
    beside: Vec<Range<u64>>,
    is_over: bool,
}

#[derive(Clone, Copy, Debug)]
struct PendingFault {
    fault: Fault,
    since: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FaultAnswer {
    /// It was given.
    Given,
    /// It is to be given again, after the events.
    Again,
    /// There is no memory for it now.
    Short,
    /// Nothing is registered there.
    Stray,
    /// The process is no more.
    Over,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum AheadStep {
    /// There is nothing to be supplied.
    Nothing,
    /// Something was supplied, or passed over.
    Done,
    /// The next of it is on its way.
    Later,
    /// The process is no more.
    Over,
}

enum Ready<T> {
    /// They are there.
    Yes(T),
    /// They are on their way, or there is no memory for them now.
    Later,
    /// They cannot be had.
    Never,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SupplyReason {
    Demand,
    Ahead,
}

/// A page that a thread waits for.
#[derive(Clone, Copy, Debug)]
struct FaultedPage {
    /// The space.
    at: usize,
    /// Its address.
    page: u64,
}

/// A part of the image that is to be supplied.
#[derive(Clone, Copy, Debug)]
struct SupplyRequest {
    /// The space.
    at: usize,
    part: ImagePart,
    /// The address of the page that a thread waits for, or [`NO_PAGE`].
    page: u64,
    reason: SupplyReason,
}

impl SupplyRequest {
    fn demand(fault: FaultedPage, part: ImagePart) -> Self {
        Self { at: fault.at, part, page: fault.page, reason: SupplyReason::Demand }
    }

    /// Of what lies around a page that was answered.
    fn beside(at: usize, part: ImagePart) -> Self {
        Self { at, part, page: NO_PAGE, reason: SupplyReason::Demand }
    }

    /// Unasked, in the space that the VM began with.
    fn ahead(part: ImagePart) -> Self {
        Self { at: 0, part, page: NO_PAGE, reason: SupplyReason::Ahead }
    }
}

/// Pages whose bytes were compared with a replayed record.
#[derive(Clone, Copy, Debug)]
struct ComparedPages {
    compared: u64,
    differing: u64,
}

impl Space {
    fn new(uffd: Uffd, pages: Pages) -> Self {
        Self { uffd, is_watched: false, pages, waiting: VecDeque::new(), beside: Vec::new(), is_over: false }
    }

    /// Supplies `range` by `call`, past pages that are there already; wakes a thread that waits for `page` in any case.
    fn give(
        &mut self,
        range: Range<u64>,
        page: u64,
        call: impl Fn(&Uffd, Range<u64>) -> CopyResult,
    ) -> Result<FaultAnswer, PeerError> {
        let (unit, end) = (self.pages.unit(), range.end);
        let (mut from, mut step, mut answer) = (range.start, end - range.start, FaultAnswer::Given);
        while from < end {
            let CopyResult { bytes, stop } = call(&self.uffd, from..end.min(from + step));
            match stop {
                None => self.pages.supplied(from..from + bytes),
                Some(CopyStop::Present) => {
                    if from == page {
                        let _ = self.uffd.wake(page..page + unit);
                    }
                    self.pages.supplied(from..from + unit);
                }
                // A range that reaches over the end of a mapping is nowhere as a whole: page by page, then.
                Some(CopyStop::Nowhere) if step > unit => {
                    step = unit;
                    continue;
                }
                Some(CopyStop::Nowhere) if from == page => answer = FaultAnswer::Stray,
                Some(CopyStop::Nowhere) => {}
                Some(CopyStop::Changing) => return Ok(FaultAnswer::Again),
                Some(CopyStop::Over) => return Ok(FaultAnswer::Over),
                Some(CopyStop::Failed(source)) => return Err(PeerError::Kernel { address: from, source }),
            }
            from += if bytes > 0 { bytes } else { unit };
        }
        Ok(answer)
    }
}

impl Vm {
    /// The work done for it is counted in `counters`, which others may look at.
    pub(super) fn new(
        uffd: Uffd,
        pages: Pages,
        source: Source,
        counters: Arc<Mutex<RestoreCounters>>,
    ) -> Self {
        Self {
            spaces: vec![Space::new(uffd, pages)],
            source,
            inbox: MessageBuffer::default(),
            streams: Streams::default(),
            windows: VecDeque::new(),
            ahead_bytes: AHEAD_BYTES,
            replayed: ReplayCursor::default(),
            filled: 0,
            fill_read: 0,
            absences: 0,
            buffer: Vec::new(),
            counters,
            strays: 0,
            shortages: 0,
            is_short: false,
            ended: Vec::new(),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.spaces[0].pages.bytes()
    }

    pub(super) fn image_end(&self) -> u64 {
        self.spaces[0].pages.image_end()
    }

    /// Has both kinds of fault told, whatever was asked for, so that no page of the image is seen before it came.
    /// Whether the VM has an image.
    pub(super) fn guard_image(&self) -> Result<bool, PeerError> {
        let Source::Mapped(_) = self.source else { return Ok(false) };
        let Space { uffd, pages, .. } = &self.spaces[0];
        for range in pages.ranges() {
            let address = range.start;
            uffd.watch(range).map_err(|source| PeerError::NotRegistered { address, source })?;
        }
        Ok(true)
    }

    /// The first is the one it began with.
    pub(super) fn spaces(&mut self) -> &mut [Space] {
        &mut self.spaces
    }

    pub(super) fn take_ended(&mut self) -> Vec<Space> {
        std::mem::take(&mut self.ended)
    }

    pub(super) fn serve(&mut self, common: &VmShared<'_>) -> Result<NextWait, PeerError> {
        self.is_short = false;
        let mut steps = 0;
        for _ in 0..ROUNDS_MAX {
            let mut messages = 0;
            for at in (0..self.spaces.len()).rev() {
                messages += self.round(at, common)?;
            }
            self.ended.extend(self.spaces.extract_if(.., |space| space.is_over));
            if self.spaces.is_empty() {
                return Ok(NextWait::Over);
            }
            match (messages, self.waits()) {
                (_, true) if self.is_short => break,
                // The event has been read, and a thread that waits for that has not run yet.
                (0, true) => std::thread::yield_now(),
                (_, true) => {}
                (_, false) if steps >= AHEAD_STEPS => break,
                (_, false) => match self.supply_ahead(common)? {
                    AheadStep::Nothing if messages == 0 => return Ok(NextWait::Wait),
                    AheadStep::Nothing => {}
                    AheadStep::Done => steps += self.ahead_bytes / AHEAD_BYTES,
                    AheadStep::Later => return Ok(NextWait::Soon),
                    AheadStep::Over => return Ok(NextWait::Over),
                },
            }
        }
        Ok(if self.waits() { NextWait::Soon } else { self.next(common) })
    }

    fn waits(&self) -> bool {
        self.spaces.iter().any(|space| !space.waiting.is_empty())
    }

    fn next(&self, common: &VmShared<'_>) -> NextWait {
        let replays = common.replayed().is_some_and(|replay| self.replayed.has_more(replay));
        let fills = common.fill == Fill::All && self.filled < common.snapshot.identity().bytes;
        if replays || fills || !self.windows.is_empty() { NextWait::Ahead } else { NextWait::Wait }
    }

    /// Steps 1 to 5; see the head of this file. How many messages there were.
    fn round(&mut self, at: usize, common: &VmShared<'_>) -> Result<usize, PeerError> {
        // 1
        let mut messages = Vec::new();
        for _ in 0..READS_MAX {
            let read = self.spaces[at].uffd.read(&mut self.inbox, &mut messages);
            if read.map_err(PeerError::Descriptor)? < MESSAGES_MAX {
                break;
            }
        }
        let (count, now) = (messages.len(), Instant::now());
        // 2
        for message in messages {
            self.note(at, message, now)?;
        }
        // 3
        self.start_reads(at, common);
        // 4
        for _ in 0..self.spaces[at].waiting.len() {
            let Some(waiting) = self.spaces[at].waiting.pop_front() else { break };
            match self.answer(at, waiting.fault, common)? {
                FaultAnswer::Given => self.count_answer(waiting.since),
                FaultAnswer::Again => self.put_back(at, waiting),
                FaultAnswer::Short => self.put_back_short(at, waiting)?,
                FaultAnswer::Stray => self.note_stray(at, waiting.fault.address)?,
                FaultAnswer::Over => {
                    self.spaces[at].is_over = true;
                    return Ok(count);
                }
            }
        }
        // 5
        self.supply_beside(at, common)?;
        Ok(count)
    }

    /// Supplies what lies around the pages that were answered, as far as it has come. No event was read since, so what
    /// is absent still may be supplied.
    fn supply_beside(&mut self, at: usize, common: &VmShared<'_>) -> Result<(), PeerError> {
        for addresses in std::mem::take(&mut self.spaces[at].beside) {
            for part in self.spaces[at].pages.absent_at(&addresses) {
                let answer = match self.ready(part, common)? {
                    Some(bytes) => self.supply(SupplyRequest::beside(at, part), bytes)?,
                    None if self.is_mapped() => self.map(SupplyRequest::beside(at, part))?,
                    None if at == 0 => {
                        self.want_window(part.offset..part.offset + part.bytes);
                        continue;
                    }
                    // Only the space that the VM began with is supplied unasked.
                    None => continue,
                };
                match answer {
                    FaultAnswer::Given | FaultAnswer::Stray => {}
                    // The rest is left to a fault.
                    FaultAnswer::Again | FaultAnswer::Short => return Ok(()),
                    FaultAnswer::Over => {
                        self.spaces[at].is_over = true;
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    fn is_mapped(&self) -> bool {
        matches!(self.source, Source::Mapped(_))
    }

    fn want_window(&mut self, window: Range<u64>) {
        if self.windows.len() == WINDOWS_MAX {
            self.windows.pop_front();
        }
        self.windows.push_back(window);
    }

    /// A fault was answered in a run of the image that was absent: what lies around its page comes next, and, if the VM
    /// walks there, what lies behind it.
    fn note_answer(&mut self, fault: FaultedPage, run: ImagePart, common: &VmShared<'_>) {
        let FaultedPage { at, page } = fault;
        if common.recorder.is_some() {
            return;
        }
        let unit = self.spaces[at].pages.unit();
        if run.bytes > unit {
            self.spaces[at].beside.push(run.address..run.address + run.bytes);
        }
        if at > 0 {
            return;
        }
        let offset = run.offset + (page - run.address);
        let image_bytes = common.snapshot.identity().bytes / unit * unit;
        let answer = run.offset..run.offset + run.bytes;
        let limits = ReadaheadLimits { image_bytes, reach_bytes: common.reach_bytes };
        let step = self.streams.fault(offset, answer, limits);
        if self.streams.is_walk() || self.is_planned(offset, common) {
            self.ahead_bytes = AHEAD_BYTES_MAX;
        }
        if let Some(StreamStep { window, reads }) = step {
            // Of the window again: what was refused or evicted since it was asked for is absent, and the rest a look.
            self.read_ahead(window.start..window.end.min(reads.start), common);
            self.read_ahead(reads, common);
            self.want_window(window);
        } else if run.bytes > unit {
            self.note_dense_region(offset, image_bytes, common);
        }
    }

    /// Whether the page at `offset` of the image comes next by the record, or by the filling of all.
    fn is_planned(&self, offset: u64, common: &VmShared<'_>) -> bool {
        let is_named = |replay: &Replay| self.replayed.has_more(replay) && replay.names(offset);
        common.replayed().is_some_and(is_named)
            || (common.fill == Fill::All && (self.filled..self.fill_read).contains(&offset))
    }

    /// If the neighbourhood of a fault's answer at `offset` is crowded, what is absent there comes next.
    fn note_dense_region(&mut self, offset: u64, image_bytes: u64, common: &VmShared<'_>) {
        let begin = offset / CROWD_BYTES * CROWD_BYTES;
        let end = (begin + CROWD_BYTES).min(image_bytes);
        let is_coming = |window: &Range<u64>| window.start < end && begin < window.end;
        if self.windows.iter().any(is_coming) {
            return;
        }
        let absent = self.spaces[0].pages.absent_in(begin, end - begin);
        let absent: u64 = absent.iter().map(|part| part.bytes).sum();
        if absent <= CROWD_ABSENT_MAX {
            self.read_ahead(begin..end, common);
            self.want_window(begin..end);
        }
    }

    fn note(&mut self, at: usize, message: Message, now: Instant) -> Result<(), PeerError> {
        let space = &mut self.spaces[at];
        match message {
            Message::Fault(_) if space.waiting.len() >= WAITING_MAX => return Err(PeerError::TooManyFaults),
            Message::Fault(fault) => space.waiting.push_back(PendingFault { fault, since: now }),
            Message::Removed(range) => {
                let bytes = range.end.saturating_sub(range.start);
                match self.source {
                    Source::Copied(_) => space.pages.removed(range),
                    Source::Mapped(_) => space.pages.forgotten(range),
                }
                self.count(|counters| counters.removed_bytes += bytes);
            }
            Message::Unmapped(range) => space.pages.unmapped(range)?,
            Message::Moved { from, to, len } => space.pages.moved(from, to, len)?,
            Message::Forked(uffd) => {
                let pages = space.pages.clone();
                self.add_space(Space::new(uffd, pages))?;
            }
            Message::Unknown(_) => {}
        }
        Ok(())
    }

    fn add_space(&mut self, space: Space) -> Result<(), PeerError> {
        if self.spaces.len() >= SPACES_MAX {
            // The kernel does not report that a fork has ended.
            self.spaces.iter_mut().skip(1).for_each(|space| space.is_over |= space.uffd.is_over());
            let living = self.spaces.iter().filter(|space| !space.is_over).count();
            if living >= SPACES_MAX {
                return Err(PeerError::TooManyForks(SPACES_MAX - 1));
            }
        }
        self.spaces.push(space);
        Ok(())
    }

    fn start_reads(&mut self, at: usize, common: &VmShared<'_>) {
        let Space { waiting, pages, .. } = &self.spaces[at];
        if waiting.len() < 2 {
            return;
        }
        let needs = waiting.iter().map(|waits| pages.need(waits.fault.address, common.run_bytes));
        for need in Vec::from_iter(needs) {
            if let PageNeed::Supply(ImagePart { offset, bytes, .. }) = need {
                self.will_want(offset, bytes, common);
            }
        }
    }

    /// Starts reads of bytes that will be wanted, unless the kernel holds the first page and the last.
    fn will_want(&mut self, offset: u64, bytes: u64, common: &VmShared<'_>) {
        let mut page = [0; PAGE_SIZE];
        let mut is_held = |offset| common.snapshot.copy_held(&mut page, offset);
        let last = (offset + bytes - 1) / PAGE * PAGE;
        if !is_held(offset) || (last > offset && !is_held(last)) {
            self.start_read(offset, bytes);
        }
    }

    /// Starts reads of bytes that the VM will want, by whole folios. Of each folio they begin with the first page that
    /// the VM lacks and end with the last, so none goes beyond the VM's memory.
    fn read_ahead(&mut self, mut reads: Range<u64>, common: &VmShared<'_>) {
        while reads.start < reads.end {
            let end = (reads.start + 1).next_multiple_of(WINDOW_BYTES_MAX).min(reads.end);
            let absent = self.spaces[0].pages.absent_in(reads.start, end - reads.start);
            let first = absent.iter().map(|part| part.offset).min();
            let behind = absent.iter().map(|part| part.offset + part.bytes).max();
            if let (Some(first), Some(behind)) = (first, behind) {
                self.will_want(first, behind - first, common);
            }
            reads.start = end;
        }
    }

    /// The read that follows tells of errors.
    fn start_read(&self, offset: u64, bytes: u64) {
        match &self.source {
            Source::Copied(file) => drop(file.will_need(offset, bytes)),
            Source::Mapped(image) => drop(image.prefetch(offset..offset + bytes)),
        }
    }

    fn count_answer(&mut self, since: Instant) {
        (self.strays, self.shortages) = (0, 0);
        let nanoseconds = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.count(|counters| {
            counters.faults += 1;
            counters.latency.add(nanoseconds);
        });
    }

    fn count(&self, add: impl FnOnce(&mut RestoreCounters)) {
        add(&mut self.counters.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn put_back(&mut self, at: usize, waiting: PendingFault) {
        self.count(|counters| counters.retries += 1);
        self.spaces[at].waiting.push_back(waiting);
    }

    /// There was no memory for its page. Others give back what they have pinned, in a moment.
    fn put_back_short(&mut self, at: usize, waiting: PendingFault) -> Result<(), PeerError> {
        self.is_short = true;
        self.shortages += 1;
        if self.shortages > SHORTAGES_MAX {
            let text = "all of the cache is pinned; give it more memory, or drop pins".to_owned();
            let source = Error::invalid_input(text);
            return Err(PeerError::NoMemory { offset: waiting.fault.address, source });
        }
        self.spaces[at].waiting.push_back(waiting);
        Ok(())
    }

    fn note_stray(&mut self, at: usize, address: u64) -> Result<(), PeerError> {
        self.strays += 1;
        if self.strays > STRAYS_MAX {
            return Err(PeerError::OutsideRegions { address });
        }
        let unit = self.spaces[at].pages.unit();
        self.wake(at, address & !(unit - 1), unit);
        Ok(())
    }

    /// That no thread waits is no error.
    fn wake(&self, at: usize, address: u64, bytes: u64) {
        let _ = self.spaces[at].uffd.wake(address..address + bytes);
    }

    fn answer(&mut self, at: usize, fault: Fault, common: &VmShared<'_>) -> Result<FaultAnswer, PeerError> {
        self.ahead_bytes = AHEAD_BYTES; // until it is known that the VM waits for what comes next
        let space = &mut self.spaces[at];
        let unit = space.pages.unit();
        let page = fault.address & !(unit - 1);
        match fault.kind {
            FaultKind::Protected => {
                let _ = space.uffd.unprotect(page..page + unit);
                self.wake(at, page, unit);
                return Ok(FaultAnswer::Given);
            }
            FaultKind::Minor | FaultKind::Missing => {}
        }
        if self.is_mapped() {
            return self.map_fault(at, fault.address, common);
        }
        if fault.kind == FaultKind::Minor {
            // The page is in a file of the VM's own, and so its bytes are, too.
            return self.spaces[at].give(page..page + unit, page, Uffd::resume);
        }
        match self.spaces[at].pages.need(fault.address, common.run_bytes) {
            PageNeed::Supply(run) => {
                let run = self.run_of(run, run.page(page, unit), common);
                self.supply_demand(FaultedPage { at, page }, run, common)
            }
            PageNeed::Zeros { address, bytes } => self.zeros(at, address..address + bytes, page),
            PageNeed::Look { address, bytes } => {
                self.count(|counters| counters.faults_present += 1);
                self.zeros(at, address..address + bytes, page)
            }
            PageNeed::Nowhere => Ok(FaultAnswer::Stray),
        }
    }

    /// The answer to a fault in an absent run: the run; or its page alone, if the replayed record names it. The
    /// record names the pages that will be wanted around it, too.
    fn run_of(&self, run: ImagePart, alone: ImagePart, common: &VmShared<'_>) -> ImagePart {
        let is_named = |replay: &Replay| self.replayed.has_more(replay) && replay.names(alone.offset);
        if common.replayed().is_some_and(is_named) { alone } else { run }
    }

    /// Supplies the page of a run that is absent; the rest of the run comes after all that is asked for.
    fn supply_demand(
        &mut self,
        fault: FaultedPage,
        run: ImagePart,
        common: &VmShared<'_>,
    ) -> Result<FaultAnswer, PeerError> {
        let FaultedPage { at, page } = fault;
        let alone = run.page(page, self.spaces[at].pages.unit());
        let bytes = match self.ready(alone, common)? {
            Some(bytes) => bytes,
            None => {
                if run != alone {
                    // One read for all of it.
                    self.start_read(run.offset, run.bytes);
                }
                match self.pin(alone, ReadOptions::default(), common)? {
                    Ok(pinned) => SnapshotBytes::Pinned(pinned),
                    Err(error) if error.kind() == ErrorKind::NoMemory => return Ok(FaultAnswer::Short),
                    Err(error) => return self.poison(at, alone, error),
                }
            }
        };
        common.note(alone.offset, bytes.chunks());
        let answer = self.supply(SupplyRequest::demand(fault, alone), bytes)?;
        if answer == FaultAnswer::Given {
            self.note_answer(fault, run, common);
        }
        Ok(answer)
    }

    /// The bytes of `part`, or why they cannot be had; they are the snapshot's.
    fn pin(
        &self,
        part: ImagePart,
        options: ReadOptions,
        common: &VmShared<'_>,
    ) -> Result<Result<Pinned, Error>, PeerError> {
        let Source::Copied(file) = &self.source else { unreachable!("what is mapped is not copied") };
        let pinned = file.pin_with(part.offset, part.bytes as usize, options);
        let is_short = pinned.as_ref().is_ok_and(|pinned| (pinned.len() as u64) < part.bytes);
        if is_short || common.snapshot.assure().is_err() {
            return Err(PeerError::SnapshotChanged);
        }
        Ok(pinned)
    }

    fn ready(&mut self, part: ImagePart, common: &VmShared<'_>) -> Result<Option<SnapshotBytes>, PeerError> {
        if self.is_mapped() {
            return Ok(None);
        }
        let (mut buffer, len) = (std::mem::take(&mut self.buffer), part.bytes as usize);
        buffer.resize(buffer.len().max(len), 0);
        if common.snapshot.copy_held(&mut buffer[..len], part.offset) {
            common.snapshot.assure().map_err(|_| PeerError::SnapshotChanged)?;
            return Ok(Some(SnapshotBytes::Copied { buffer, len }));
        }
        self.buffer = buffer;
        Ok(self.pin(part, ReadOptions::new().cached_only(true), common)?.ok().map(SnapshotBytes::Pinned))
    }

    fn supply(&mut self, request: SupplyRequest, bytes: SnapshotBytes) -> Result<FaultAnswer, PeerError> {
        let answer = self.supply_chunks(request, bytes.chunks());
        self.recycle(bytes);
        answer
    }

    fn recycle(&mut self, bytes: SnapshotBytes) {
        if let SnapshotBytes::Copied { buffer, .. } = bytes {
            self.buffer = buffer;
        }
    }

    fn supply_chunks<'b>(
        &mut self,
        request: SupplyRequest,
        chunks: impl Iterator<Item = &'b [u8]>,
    ) -> Result<FaultAnswer, PeerError> {
        let SupplyRequest { at, part, page, reason } = request;
        let unit = self.spaces[at].pages.unit();
        let (mut address, mut found) = (part.address, FaultAnswer::Given);
        for piece in whole_units(chunks, unit as usize) {
            let piece: &[u8] = &piece;
            for part in same_kind(piece, unit as usize) {
                let (from, is_zero) = part;
                let bytes = from.len() as u64;
                let answer = if is_zero {
                    self.zeros(at, address..address + bytes, page)?
                } else {
                    let begin = address;
                    self.spaces[at].give(begin..begin + bytes, page, |uffd, range| {
                        let inside = (range.start - begin) as usize..(range.end - begin) as usize;
                        uffd.copy(range.start, &from[inside])
                    })?
                };
                match answer {
                    FaultAnswer::Given => {}
                    FaultAnswer::Stray => found = FaultAnswer::Stray,
                    _ => return Ok(answer),
                }
                address += bytes;
                self.count(|counters| match reason {
                    SupplyReason::Demand => counters.demand_bytes += bytes,
                    SupplyReason::Ahead => counters.ahead_bytes += bytes,
                });
            }
        }
        Ok(found)
    }

    fn zeros(&mut self, at: usize, range: Range<u64>, page: u64) -> Result<FaultAnswer, PeerError> {
        self.count(|counters| counters.zero_bytes += range.end - range.start);
        let space = &mut self.spaces[at];
        let unit = space.pages.unit();
        if unit == PAGE {
            return space.give(range, page, Uffd::zero);
        }
        // Large pages have no page of zeros to share.
        let zeros = vec![0; unit as usize];
        space.give(range, page, |uffd, range| uffd.copy(range.start, &zeros))
    }

    fn map_fault(
        &mut self,
        at: usize,
        address: u64,
        common: &VmShared<'_>,
    ) -> Result<FaultAnswer, PeerError> {
        let pages = &self.spaces[at].pages;
        let unit = pages.unit();
        let page = address & !(unit - 1);
        let run = match pages.need(address, common.run_bytes) {
            PageNeed::Supply(run) => run,
            // It was mapped. It was given back without an event, or another thread was faster.
            PageNeed::Look { address, bytes } | PageNeed::Zeros { address, bytes } => {
                self.count(|counters| counters.faults_present += 1);
                return self.spaces[at].give(address..address + bytes, page, Uffd::resume);
            }
            PageNeed::Nowhere => return Ok(FaultAnswer::Stray),
        };
        let wide = match pages.need(address, MAPPED_BYTES) {
            PageNeed::Supply(wide) if common.recorder.is_none() && self.is_resident(wide) => wide,
            _ => run,
        };
        let (fault, alone) = (FaultedPage { at, page }, run.page(page, unit));
        if run != alone && !self.is_resident(run) {
            self.start_read(run.offset, run.bytes);
        }
        let answer = self.map(SupplyRequest::demand(fault, alone))?;
        if answer == FaultAnswer::Given {
            self.note_mapped(alone, common)?;
            self.note_answer(fault, wide, common);
        }
        Ok(answer)
    }

    fn is_resident(&self, part: ImagePart) -> bool {
        matches!(&self.source, Source::Mapped(image) if image.is_resident(part.offset..part.offset + part.bytes))
    }

    fn note_mapped(&self, part: ImagePart, common: &VmShared<'_>) -> Result<(), PeerError> {
        let (Source::Mapped(image), Some(_)) = (&self.source, common.recorder) else { return Ok(()) };
        let mut bytes = vec![0; part.bytes as usize];
        // A page that cannot be read was poisoned, and is none to have ready next time.
        if image.read_at(&mut bytes, part.offset).is_ok_and(|read| read == bytes.len()) {
            common.note(part.offset, std::iter::once(&bytes[..]));
        }
        Ok(())
    }

    fn map(&mut self, request: SupplyRequest) -> Result<FaultAnswer, PeerError> {
        let SupplyRequest { at, part, page, reason } = request;
        let Source::Mapped(image) = &self.source else { unreachable!("what is copied is not mapped") };
        let image = image.clone();
        let ImagePart { address, offset, bytes } = part;
        let (mut there, mut failed): (Vec<Range<u64>>, Option<Error>) = (Vec::new(), None);
        let wanted = page.wrapping_sub(address).wrapping_add(offset);
        let asked = image.ensure_each(offset..offset + bytes, |range, came| {
            match came {
                Ok(()) => there.push(range),
                // The error of the page that a thread waits for is reported; any, if none waits.
                Err(error) if range.contains(&wanted) || failed.is_none() => failed = Some(error),
                Err(_) => {}
            }
            ControlFlow::Continue(())
        });
        if image.has_changed() || asked.is_err() {
            return Err(PeerError::SnapshotChanged);
        }
        let mut found = FaultAnswer::Given;
        for range in &there {
            let (len, start) = (range.end - range.start, range.start - offset + address);
            match self.spaces[at].give(start..start + len, page, Uffd::resume)? {
                FaultAnswer::Given => {}
                FaultAnswer::Stray => found = FaultAnswer::Stray,
                other => return Ok(other),
            }
            self.count(|counters| {
                counters.mapped_bytes += len;
                match reason {
                    SupplyReason::Demand => counters.demand_bytes += len,
                    SupplyReason::Ahead => counters.ahead_bytes += len,
                }
            });
        }
        let is_there = page == NO_PAGE || there.iter().any(|range| range.contains(&wanted));
        match failed {
            Some(error) if !is_there && error.kind() == ErrorKind::NoMemory => Ok(FaultAnswer::Short),
            Some(error) if !is_there => {
                let unit = self.spaces[at].pages.unit();
                self.poison(at, ImagePart { address: page, offset: wanted, bytes: unit }, error)
            }
            _ => Ok(found),
        }
    }

    fn poison(&mut self, at: usize, stretch: ImagePart, source: Error) -> Result<FaultAnswer, PeerError> {
        let ImagePart { address, offset, bytes } = stretch;
        let poisoned = self.spaces[at].give(address..address + bytes, address, Uffd::poison);
        match poisoned {
            Err(PeerError::Kernel { source: poison, .. }) => {
                Err(PeerError::Unreadable { offset, source, poison })
            }
            Ok(FaultAnswer::Given) => {
                self.count(|counters| counters.poisoned_bytes += bytes);
                Ok(FaultAnswer::Given)
            }
            other => other,
        }
    }

    /// Step 6: supplies the next piece of what is supplied unasked, as far as it is absent.
    fn supply_ahead(&mut self, common: &VmShared<'_>) -> Result<AheadStep, PeerError> {
        if let Some(window) = self.windows.pop_front() {
            let (step, from) = self.supply_range(window.clone(), common)?;
            if from < window.end {
                self.windows.push_front(from..window.end);
            }
            return Ok(step);
        }
        if let Some(replay) = common.replayed().filter(|replay| self.replayed.has_more(replay)) {
            return self.supply_replayed(replay, common);
        }
        let end = common.snapshot.identity().bytes;
        if common.fill != Fill::All || self.filled >= end {
            return Ok(AheadStep::Nothing);
        }
        self.fill_read = self.fill_read.max(self.filled);
        let edge = (self.filled + WARM_BYTES).next_multiple_of(WINDOW_BYTES_MAX).min(end);
        let reads = self.fill_read..edge.max(self.fill_read);
        self.fill_read = reads.end;
        self.read_ahead(reads, common);
        let (step, from) = self.supply_range(self.filled..end, common)?;
        self.filled = from;
        Ok(step)
    }

    /// Supplies what is absent first in `range` of the image; up to where nothing is, now.
    fn supply_range(
        &mut self,
        range: Range<u64>,
        common: &VmShared<'_>,
    ) -> Result<(AheadStep, u64), PeerError> {
        let end = range.end.min(range.start + WINDOW_BYTES_MAX);
        let absent = self.spaces[0].pages.absent_in(range.start, end - range.start);
        let Some(first) = absent.into_iter().min_by_key(|part| part.offset) else {
            return Ok((AheadStep::Done, end));
        };
        let unit = self.spaces[0].pages.unit();
        let of = |bytes: u64| ImagePart { bytes: first.bytes.min(bytes.max(unit)), ..first };
        let (mut part, large) = (of(AHEAD_BYTES), of(self.ahead_bytes));
        // Of a large step that has not come as a whole, the first part may have. An image's is waited for as one.
        let ready = if large == part { None } else { self.ready(large, common)? };
        if ready.is_some() || self.is_mapped() {
            part = large;
        }
        let behind = part.offset + part.bytes;
        let answer = if self.is_mapped() {
            self.map(SupplyRequest::ahead(part))?
        } else if let Some(bytes) = ready {
            self.absences = 0;
            self.supply(SupplyRequest::ahead(part), bytes)?
        } else {
            match self.ready_ahead(part, common)? {
                Ready::Yes(bytes) => self.supply(SupplyRequest::ahead(part), bytes)?,
                Ready::Later => return Ok((AheadStep::Later, part.offset)),
                Ready::Never => return Ok((AheadStep::Done, behind)),
            }
        };
        Ok(match answer {
            // Pages that could not be supplied are absent still; a thread that wants one will get the error.
            FaultAnswer::Given | FaultAnswer::Stray => (AheadStep::Done, behind),
            // The events first.
            FaultAnswer::Again => (AheadStep::Done, part.offset),
            FaultAnswer::Short => (AheadStep::Later, part.offset),
            FaultAnswer::Over => (AheadStep::Over, part.offset),
        })
    }

    fn ready_ahead(
        &mut self,
        part: ImagePart,
        common: &VmShared<'_>,
    ) -> Result<Ready<SnapshotBytes>, PeerError> {
        if let Some(bytes) = self.ready(part, common)? {
            self.absences = 0;
            return Ok(Ready::Yes(bytes));
        }
        let Source::Copied(file) = &self.source else { unreachable!("what is mapped is not copied") };
        // This takes what has come off the device's queue, too.
        let residency = file.residency(part.offset, part.bytes).unwrap_or_default();
        if residency.filling_pages > 0 {
            return Ok(Ready::Later);
        }
        self.absences += 1;
        // All of it is there; a lock was busy before.
        let is_there = residency.pages > 0 && residency.cached_pages == residency.pages;
        if !is_there && self.absences <= ABSENCES_MAX {
            self.start_read(part.offset, part.bytes);
            return Ok(Ready::Later);
        }
        // It was evicted again and again, or cannot be read: that is found out by waiting for it.
        self.absences = 0;
        Ok(match self.pin(part, ReadOptions::default(), common)? {
            Ok(pinned) => Ready::Yes(SnapshotBytes::Pinned(pinned)),
            Err(error) if error.kind() == ErrorKind::NoMemory => Ready::Later,
            Err(_) => Ready::Never,
        })
    }

    fn supply_replayed(&mut self, replay: &Replay, common: &VmShared<'_>) -> Result<AheadStep, PeerError> {
        for read in self.replayed.warm(replay, WARM_BYTES) {
            self.read_ahead(read, common);
        }
        let mut left = self.ahead_bytes;
        for _ in 0..AHEAD_RUNS {
            let Some(run) = self.replayed.next(replay, left) else { break };
            match self.supply_run(replay, run, common)? {
                FaultAnswer::Given | FaultAnswer::Stray => self.replayed.pass(replay, run.len()),
                FaultAnswer::Again => return Ok(AheadStep::Done),
                // Of a large step that has not come as a whole, the first part may have.
                FaultAnswer::Short if run.len() as u64 * PAGE > AHEAD_BYTES => {
                    left = AHEAD_BYTES;
                    continue;
                }
                FaultAnswer::Short => return Ok(AheadStep::Later),
                FaultAnswer::Over => return Ok(AheadStep::Over),
            }
            left = left.saturating_sub(run.len() as u64 * PAGE);
            if left == 0 {
                break;
            }
        }
        Ok(AheadStep::Done)
    }

    /// Supplies what is absent and unchanged of these pages, which follow each other.
    fn supply_run(
        &mut self,
        replay: &Replay,
        run: &[RecordedPage],
        common: &VmShared<'_>,
    ) -> Result<FaultAnswer, PeerError> {
        let (offset, bytes) = (u64::from(run[0].page) * PAGE, run.len() as u64 * PAGE);
        let absent = self.spaces[0].pages.absent_in(offset, bytes);
        let (mut found, mut stale) = (FaultAnswer::Given, 0);
        for part in absent {
            // A large page is read as a whole, and compared where the record names it.
            let named = part.offset.max(offset)..(part.offset + part.bytes).min(offset + bytes);
            // A large step gives no page up; and it waits for none, but for an image's.
            let come = match bytes {
                0..=AHEAD_BYTES => self.bytes_ahead(part, common)?,
                _ => self.bytes_as_one(part, common)?.map_or(Ready::Later, Ready::Yes),
            };
            let bytes = match come {
                Ready::Yes(bytes) => bytes,
                Ready::Later => return Ok(FaultAnswer::Short),
                Ready::Never => continue,
            };
            let skipped = ((named.start - part.offset) / PAGE) as usize;
            let first = ((named.start - offset) / PAGE) as usize;
            let same: Vec<bool> = bytes
                .pages()
                .skip(skipped)
                .zip(&run[first..])
                .map(|(page, entry)| digest(page) == entry.digest)
                .collect();
            let of_before =
                || run[first..].iter().zip(&same).filter(|(_, same)| **same).map(|(entry, _)| *entry);
            common.note_pages(of_before());
            // Unchanged ones are supplied, and come again with no retry; the others are counted when the run has been
            // passed.
            let unchanged = of_before().count();
            let counted = ComparedPages { compared: unchanged as u64, differing: 0 };
            self.note_compared(replay, counted, common);
            stale += (same.len() - unchanged) as u64;
            for same in same_parts(part, &same, self.spaces[0].pages.unit()) {
                let answer = if self.is_mapped() {
                    self.map(SupplyRequest::ahead(same))?
                } else if same == part {
                    // All of them, as a rule.
                    self.supply_chunks(SupplyRequest::ahead(part), bytes.chunks())?
                } else {
                    match self.ready(same, common)? {
                        Some(bytes) => self.supply(SupplyRequest::ahead(same), bytes)?,
                        None => FaultAnswer::Stray,
                    }
                };
                match answer {
                    FaultAnswer::Given => {}
                    FaultAnswer::Stray => found = FaultAnswer::Stray,
                    other => return Ok(other),
                }
            }
            self.recycle(bytes);
        }
        self.note_compared(replay, ComparedPages { compared: stale, differing: stale }, common);
        Ok(found)
    }

    fn bytes_ahead(
        &mut self,
        part: ImagePart,
        common: &VmShared<'_>,
    ) -> Result<Ready<SnapshotBytes>, PeerError> {
        if !self.is_mapped() {
            return self.ready_ahead(part, common);
        }
        Ok(self.bytes_as_one(part, common)?.map_or(Ready::Never, Ready::Yes))
    }

    /// All bytes of `part`, or none. Those of an image are waited for.
    fn bytes_as_one(
        &mut self,
        part: ImagePart,
        common: &VmShared<'_>,
    ) -> Result<Option<SnapshotBytes>, PeerError> {
        let (mut buffer, len) = (std::mem::take(&mut self.buffer), part.bytes as usize);
        let Source::Mapped(image) = &self.source else {
            self.buffer = buffer;
            return self.ready(part, common);
        };
        buffer.resize(buffer.len().max(len), 0);
        let read = image.read_at(&mut buffer[..len], part.offset);
        if image.has_changed() {
            return Err(PeerError::SnapshotChanged);
        }
        let bytes = SnapshotBytes::Copied { buffer, len };
        if read.is_ok_and(|read| read == len) {
            return Ok(Some(bytes));
        }
        self.recycle(bytes);
        Ok(None)
    }

    fn note_compared(&self, replay: &Replay, pages: ComparedPages, common: &VmShared<'_>) {
        let ComparedPages { compared, differing } = pages;
        self.count(|counters| counters.stale_bytes += differing * PAGE);
        if let Some((differing, compared)) = replay.note(compared, differing) {
            (common.tell)(&Event::ReplayStale { differing, compared });
        }
    }
}

enum SnapshotBytes {
    /// They lie in the cache.
    Pinned(Pinned),
    /// The first `len` of a buffer.
    Copied { buffer: Vec<u8>, len: usize },
}

impl SnapshotBytes {
    fn chunks(&self) -> impl Iterator<Item = &[u8]> {
        let (pinned, copied) = match self {
            Self::Pinned(pinned) => (Some(pinned), None),
            Self::Copied { buffer, len } => (None, Some(&buffer[..*len])),
        };
        pinned.into_iter().flat_map(Pinned::chunks).chain(copied)
    }

    fn pages(&self) -> impl Iterator<Item = &[u8]> {
        self.chunks().flat_map(|chunk| chunk.chunks(PAGE_SIZE))
    }
}

/// The stretches of `part` whose pages are all unchanged. A large page is supplied if what the record names of it is.
fn same_parts(part: ImagePart, same: &[bool], unit: u64) -> Vec<ImagePart> {
    if unit != PAGE {
        return if same.iter().all(|same| *same) { vec![part] } else { Vec::new() };
    }
    let (mut parts, mut at) = (Vec::new(), 0);
    for stretch in same.chunk_by(|a, b| a == b) {
        if stretch[0] {
            let skipped = at as u64 * PAGE;
            let (address, offset) = (part.address + skipped, part.offset + skipped);
            parts.push(ImagePart { address, offset, bytes: stretch.len() as u64 * PAGE });
        }
        at += stretch.len();
    }
    parts
}

/// Bytes that are borrowed, or that were put together.
enum SuppliedBytes<'a> {
    Borrowed(&'a [u8]),
    Joined(Vec<u8>),
}

impl std::ops::Deref for SuppliedBytes<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Joined(bytes) => bytes,
        }
    }
}

/// `chunks`, whole units together, cut at multiples of `unit`; a unit that lies in several of them is put together.
fn whole_units<'a>(
    chunks: impl Iterator<Item = &'a [u8]>,
    unit: usize,
) -> impl Iterator<Item = SuppliedBytes<'a>> {
    let mut open: Vec<u8> = Vec::new();
    chunks.flat_map(move |mut chunk| {
        let mut pieces = Vec::new();
        if !open.is_empty() {
            let (joins, rest) = chunk.split_at(chunk.len().min(unit - open.len()));
            open.extend_from_slice(joins);
            chunk = rest;
            if open.len() == unit {
                pieces.push(SuppliedBytes::Joined(std::mem::take(&mut open)));
            }
        }
        let (whole, rest) = chunk.split_at(chunk.len() / unit * unit);
        if !whole.is_empty() {
            pieces.push(SuppliedBytes::Borrowed(whole));
        }
        open.extend_from_slice(rest);
        pieces
    })
}

/// Bytes as stretches of whole pages that are all zeros, and of others. Large pages are not asked: they cannot be
/// shared.
fn same_kind(bytes: &[u8], unit: usize) -> Vec<(&[u8], bool)> {
    let mut parts: Vec<(&[u8], bool)> = Vec::new();
    if unit != PAGE_SIZE {
        return vec![(bytes, false)];
    }
    let (mut begin, mut kind) = (0, None);
    for (number, page) in bytes.chunks(unit).enumerate() {
        let is_zero = is_zero(page);
        if kind.is_some_and(|kind| kind != is_zero) {
            parts.push((&bytes[begin..number * unit], !is_zero));
            begin = number * unit;
        }
        kind = Some(is_zero);
    }
    if let Some(kind) = kind {
        parts.push((&bytes[begin..], kind));
    }
    parts
}

/// Of most pages that are not zeros, the first bytes say so.
fn is_zero(page: &[u8]) -> bool {
    page.chunks(256).all(|some| some.iter().fold(0, |all, byte| all | byte) == 0)
}

#[cfg(test)]
mod tests;

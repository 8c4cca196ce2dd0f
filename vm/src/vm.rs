//! VM: one virtual machine that is served: what its userfaultfd says, and the answers.
//!
//! ```text
//!   a round     1 read      what can be read now, a thousand messages at most
//!               2 note      the events of it, in their order: given back, unmapped, moved, forked
//!               3 start     the reads of all faults that wait, if there are several
//!               4 answer    each fault that waits, by its page alone: supply, zeros, or wake
//!                             refused, the memory is changing --> it waits for the next round
//!                             its page comes from another machine --> it waits until the read has ended
//!               5 beside    what lies around each page that was answered, as far as it is there
//!   no fault    6 ahead     a piece of what is supplied unasked: what is still absent of it
//! ```
//!
//! | file | purpose |
//! |---|---|
//! | `answer` | step 4: supply, zeros, poison, map |
//! | `ahead` | step 6, and what tells it which part of the image comes next |
//! | `bytes` | bytes of the snapshot as whole pages, of zeros or not; pure |
//! | `page_read` | the read of a page that no worker waits for |
//!
//! A VM may be forked: the child has the same regions, what was supplied so far, and a userfaultfd of its own, a
//! **space**. All of a VM's spaces are served together, until the process that connected is no more.
//!
//! One worker at a time has a VM, so only the record is locked here, for a moment.
//!
//! Not an invariant: that a fault's address is in a region still. It may have been unmapped; the woken thread finds
//! that out. Only if it comes back again and again, something is wrong.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

use quinion::internals::hooks::invalid_input;
use quinion::internals::units::PAGE_SIZE;
use quinion::{Error, File, Image};

use super::fault_record::{RecordedPage, Recorder};
use super::pages::{ImagePart, MoveError, PageNeed, Pages};
use super::replay::{Replay, ReplayCursor};
use super::snapshot::Snapshot;
use super::stats::RestoreCounters;
use super::streams::Streams;
use super::takeover::{SPACES_MAX, states_bytes};
use super::{Event, Fill, PeerError};
use crate::uffd::{CopyResult, CopyStop, Fault, MESSAGES_MAX, Message, MessageBuffer, Uffd};

pub(super) use ahead::WARM_BYTES;
use ahead::{AHEAD_BYTES, AHEAD_STEPS, AheadStep};
use page_read::PageRead;

mod ahead;
mod answer;
mod bytes;
mod page_read;

/// Rounds in one turn, so that other VMs have theirs.
const ROUNDS_MAX: usize = 16;
/// How often the descriptor is read in one round, so that a round ends.
const READS_MAX: usize = 16;
/// Faults that wait at a time: each is a thread's, but a thread that wakes its threads itself could go on without end.
const WAITING_MAX: usize = 1 << 16;
/// Faults in no region in a row that are taken for memory that was unmapped meanwhile.
const STRAYS_MAX: u32 = 256;
/// How long one fault may find no memory for its page, and how often at least: a server that was stopped meanwhile has
/// not looked for long.
const SHORTAGE_MAX: Duration = Duration::from_secs(10);
const SHORTAGE_TRIES_MIN: u32 = 100;
/// No thread waits for a page.
const NO_PAGE: u64 = u64::MAX;
const PAGE: u64 = PAGE_SIZE as u64;

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
    /// How far a replayed record is read before what is supplied, in bytes.
    pub(super) replay_ahead_bytes: u64,
    /// How long reads that fail are tried again.
    pub(super) retry_reads: Duration,
    /// Called when the VM's process was forked, before the fork may run on.
    pub(super) note_fork: &'a dyn Fn(),
    /// Makes a waker that has the VM looked at again.
    pub(super) waker: &'a dyn Fn() -> Waker,
    pub(super) emit_event: &'a dyn Fn(&Event),
    /// Called with bytes of the snapshot that the VM was refused, and why.
    pub(super) report_poisoned: &'a dyn Fn(Range<u64>, Error),
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
    /// Another turn when a read has ended, or after a while: a thread waits for a page that is on its way.
    Read,
    /// Another turn when no other VM wants one: there is more to supply ahead.
    Ahead,
    /// No further turn: the VM's process is no more.
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
    /// When the last of these was found, if the reads may hang.
    absent_since: Option<Instant>,
    /// Reads that faults wait for, by their place in the snapshot.
    reads: HashMap<u64, PageRead>,
    buffer: Vec<u8>,
    counters: Arc<Mutex<RestoreCounters>>,
    strays: u32,
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
    /// Whether its page is on its way, and no worker waits for it.
    awaits_read: bool,
    shortage: Option<Shortage>,
}

/// There was no memory for a fault's page, from some time on, so many times in a row.
#[derive(Clone, Copy, Debug)]
struct Shortage {
    since: Instant,
    tries: u32,
}

impl PendingFault {
    fn new(fault: Fault, since: Instant) -> Self {
        Self { fault, since, awaits_read: false, shortage: None }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FaultAnswer {
    /// The answer was given.
    Given,
    /// The answer is to be given again, after the events.
    Again,
    /// There is no memory for it now.
    Short,
    /// The fault's page is on its way.
    Reading,
    /// No memory is registered there.
    Stray,
    /// The process is no more.
    Over,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SupplyReason {
    Demand,
    Ahead,
}

/// A page that a thread waits for.
#[derive(Clone, Copy, Debug)]
struct FaultedPage {
    /// Index of the space among the VM's.
    at: usize,
    /// The page's address.
    page: u64,
    /// When the fault was read.
    since: Instant,
}

/// A part of the image that is to be supplied.
#[derive(Clone, Copy, Debug)]
struct SupplyRequest {
    /// Index of the space among the VM's.
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

    /// The part that lies around a page that was answered.
    fn beside(at: usize, part: ImagePart) -> Self {
        Self { at, part, page: NO_PAGE, reason: SupplyReason::Demand }
    }

    /// Unasked, in the space that the VM began with.
    fn ahead(part: ImagePart) -> Self {
        Self { at: 0, part, page: NO_PAGE, reason: SupplyReason::Ahead }
    }
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
            absent_since: None,
            reads: HashMap::new(),
            buffer: Vec::new(),
            counters,
            strays: 0,
            is_short: false,
            ended: Vec::new(),
        }
    }

    /// One that another server has served: its spaces, the one that it began with first.
    pub(super) fn taken_over(
        mut spaces: Vec<(Uffd, Pages)>,
        source: Source,
        counters: Arc<Mutex<RestoreCounters>>,
    ) -> Self {
        let (uffd, pages) = spaces.remove(0);
        let mut vm = Self::new(uffd, pages, source, counters);
        vm.spaces.extend(spaces.into_iter().map(|(uffd, pages)| Space::new(uffd, pages)));
        vm
    }

    /// Has every thread whose fault was read and not answered fault anew, so that this server's reader, or another's,
    /// finds it. All events that were read are noted.
    pub(super) fn release_faults(&mut self) {
        self.reads.clear();
        for space in &mut self.spaces {
            space.beside.clear();
            let unit = space.pages.unit();
            for waiting in std::mem::take(&mut space.waiting) {
                let page = waiting.fault.address & !(unit - 1);
                let _ = space.uffd.wake(page..page + unit);
            }
        }
    }

    /// Has every thread that waits in its regions fault anew.
    pub(super) fn wake_all(&self) {
        for Space { uffd, pages, .. } in &self.spaces {
            pages.ranges().for_each(|range| drop(uffd.wake(range)));
        }
    }

    /// The VM's userfaultfds, the first of which is the one that it began with.
    pub(super) fn uffds(&self) -> impl Iterator<Item = &Uffd> {
        self.spaces.iter().map(|space| &space.uffd)
    }

    /// The states of its pages, as another server reads them.
    pub(super) fn states_bytes(&self) -> Vec<u8> {
        states_bytes(self.spaces.iter().map(|space| &space.pages))
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
                    AheadStep::Nothing if messages == 0 => return Ok(self.rest()),
                    AheadStep::Nothing => {}
                    AheadStep::Done => steps += self.ahead_bytes / AHEAD_BYTES,
                    // It fails, and is tried again after a pause.
                    AheadStep::Later if self.absent_since.is_some() && self.absences > 1 => {
                        return Ok(NextWait::Read);
                    }
                    AheadStep::Later => return Ok(NextWait::Soon),
                    AheadStep::Over => self.spaces[0].is_over = true,
                },
            }
        }
        Ok(if self.waits() { NextWait::Soon } else { self.next(common) })
    }

    fn any_fault(&self, is_one: impl Fn(&PendingFault) -> bool) -> bool {
        self.spaces.iter().any(|space| space.waiting.iter().any(&is_one))
    }

    /// Whether there are faults that may be answered now.
    fn waits(&self) -> bool {
        self.any_fault(|waiting| !waiting.awaits_read)
    }

    /// How the VM waits when no other work is to be done.
    fn rest(&mut self) -> NextWait {
        if self.any_fault(|waiting| waiting.awaits_read) {
            return NextWait::Read;
        }
        self.reads.clear();
        NextWait::Wait
    }

    fn next(&mut self, common: &VmShared<'_>) -> NextWait {
        let replays = common.replayed().is_some_and(|replay| self.replayed.has_more(replay));
        let fills = common.fill == Fill::All && self.filled < common.snapshot.identity().bytes;
        if replays || fills || !self.windows.is_empty() { NextWait::Ahead } else { self.rest() }
    }

    /// Steps 1 to 5; see the head of this file. How many messages there were.
    fn round(&mut self, at: usize, common: &VmShared<'_>) -> Result<usize, PeerError> {
        // 1
        let mut messages = Vec::new();
        for _ in 0..READS_MAX {
            let before = messages.len();
            let read = self.spaces[at].uffd.read(&mut self.inbox, &mut messages);
            if messages[before..].iter().any(|message| matches!(message, Message::Forked(_))) {
                (common.note_fork)();
            }
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
            match self.answer(at, waiting, common)? {
                FaultAnswer::Given => self.count_answer(waiting.since),
                FaultAnswer::Again => self.put_back(at, waiting),
                FaultAnswer::Short => self.put_back_short(at, waiting)?,
                FaultAnswer::Reading => {
                    let waiting = PendingFault { awaits_read: true, shortage: None, ..waiting };
                    self.spaces[at].waiting.push_back(waiting);
                }
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
                    None if self.is_mapped() => self.map(SupplyRequest::beside(at, part), common)?,
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
                    FaultAnswer::Again | FaultAnswer::Short | FaultAnswer::Reading => return Ok(()),
                    FaultAnswer::Over => {
                        self.spaces[at].is_over = true;
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    pub(super) fn is_mapped(&self) -> bool {
        matches!(self.source, Source::Mapped(_))
    }

    fn note(&mut self, at: usize, message: Message, now: Instant) -> Result<(), PeerError> {
        let space = &mut self.spaces[at];
        match message {
            Message::Fault(_) if space.waiting.len() >= WAITING_MAX => return Err(PeerError::TooManyFaults),
            Message::Fault(fault) => {
                space.waiting.push_back(PendingFault::new(fault, now));
            }
            Message::Removed(range) => {
                let bytes = range.end.saturating_sub(range.start);
                match self.source {
                    Source::Copied(_) => space.pages.removed(range),
                    Source::Mapped(_) => space.pages.forgotten(range),
                }
                self.count(|counters| counters.removed_bytes += bytes);
            }
            Message::Unmapped(range) => space.pages.unmapped(range)?,
            Message::Moved { from, to, len } => {
                let bytes = space.pages.unit();
                space.pages.moved(from, to, len).map_err(|wrong| match wrong {
                    MoveError::TooManyPieces(wrong) => wrong.into(),
                    MoveError::BetweenPages => PeerError::MovedBetweenPages { address: to, bytes },
                })?;
            }
            Message::Forked(uffd) => {
                let pages = space.pages.clone();
                self.add_space(Space::new(uffd, pages))?;
            }
            Message::Unknown(_) => {}
        }
        Ok(())
    }

    /// After the end of the process that the VM began with: whether another has its memory, as forks have.
    pub(super) fn has_living_forks(&mut self) -> bool {
        self.spaces.iter_mut().for_each(|space| space.is_over |= space.uffd.is_over());
        self.spaces.iter().any(|space| !space.is_over)
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
        let parts = needs.filter_map(|need| match need {
            PageNeed::Supply(ImagePart { offset, bytes, .. }) => Some(offset..offset + bytes),
            _ => None,
        });
        let parts = Vec::from_iter(parts);
        self.will_want(&parts, common);
    }

    fn count_answer(&mut self, since: Instant) {
        self.strays = 0;
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
        let waiting = PendingFault { awaits_read: false, shortage: None, ..waiting };
        self.spaces[at].waiting.push_back(waiting);
    }

    /// There was no memory for its page, also none to read a copy by. Others need what they have for a moment only.
    fn put_back_short(&mut self, at: usize, waiting: PendingFault) -> Result<(), PeerError> {
        self.is_short = true;
        let mut shortage = waiting.shortage.unwrap_or(Shortage { since: Instant::now(), tries: 0 });
        shortage.tries += 1;
        if shortage.since.elapsed() > SHORTAGE_MAX && shortage.tries >= SHORTAGE_TRIES_MIN {
            let text = "all of the cache is pinned; give it more memory, or drop pins".to_owned();
            let source = invalid_input(text);
            return Err(PeerError::NoMemory { offset: waiting.fault.address, source });
        }
        let waiting = PendingFault { awaits_read: false, shortage: Some(shortage), ..waiting };
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

    /// Wakes threads that wait for these bytes, if there are any.
    fn wake(&self, at: usize, address: u64, bytes: u64) {
        let _ = self.spaces[at].uffd.wake(address..address + bytes);
    }
}

#[cfg(test)]
mod tests;

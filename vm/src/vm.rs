//! VM: one virtual machine that is served: what its userfaultfd says, and the answers.
//!
//! ```text
//!   a round     1 read      what can be read now, a thousand messages at most
//!               2 note      the events of it, in their order: given back, unmapped, moved, forked
//!               3 start     the reads of all faults that wait, if there are several
//!               4 answer    each fault that waits: supply, zeros, or wake
//!                             refused, the memory is changing --> it waits for the next round
//!   no fault    5 ahead     a piece of the trace, if there is one: what is still absent of it
//! ```
//!
//! An answer is [`supply`](Vm::supply): pin a run of the snapshot, see that it is still the same, and give the kernel
//! the pinned bytes piece by piece as they lie in memory. Pages of zeros are not copied but asked for. If the run
//! cannot be read the page that was asked for is tried alone, and if it cannot either it is poisoned.
//!
//! A VM that has mapped the **image** needs no bytes: its pages are made resident in the image, and mapped where it has
//! none. What is resident around them anyway is mapped with them. Memory that it gives back shows the image again, as
//! any private mapping of a file does; a VMM that wants zeros there maps something else over it.
//!
//! A VM may be forked: the child has the same regions, what was supplied so far, and a userfaultfd of its own, a
//! **space**. All of a VM's spaces are served together.
//!
//! When the process that connected is no more, its forks are served no more either: nothing is there that answers for
//! them.
//!
//! One worker at a time has a VM, so nothing here is locked but the record, for a moment.
//!
//! Not an invariant: that a fault's address is in a region still. It may have been unmapped since; a thread that waits
//! there is woken, and finds that out. Only if it comes back again and again, something is wrong.

use std::collections::VecDeque;
use std::ops::{ControlFlow, Range};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use crate::uffd::{CopyResult, CopyStop, Fault, FaultKind, MESSAGES_MAX, Message, MessageBuffer, Uffd};
use quinion::Pinned;
use quinion::internals::sync::lock::Mutex;
use quinion::internals::units::PAGE_SIZE;
use quinion::{Error, ErrorKind};
use quinion::{File, Image};

use super::PeerError;
use super::pages::{ImagePart, PageNeed, Pages};
use super::snapshot::Snapshot;
use super::stats::RestoreCounters;
use super::trace::{ImageRun, Recorder, Trace};

/// Rounds in one turn, so that other VMs have theirs.
const ROUNDS_MAX: usize = 16;
/// How often the descriptor is read in one round, so that a round ends.
const READS_MAX: usize = 16;
/// Faults that wait at a time: each is a thread's, but a thread that wakes its threads itself could go on without end.
const WAITING_MAX: usize = 1 << 16;
/// A VM's address spaces: its own, and those of its forks that live.
pub(super) const SPACES_MAX: usize = 8;
/// What is supplied ahead between two looks at what is asked for, in bytes.
const AHEAD_BYTES: u64 = 256 << 10;
/// Runs of a trace that are looked at in one go.
const AHEAD_RUNS: usize = 64;
/// How far before what is supplied ahead the snapshot is read, in bytes.
const WARM_BYTES: u64 = 8 << 20;
/// Faults in no region, one after the other, that are taken for memory that was unmapped meanwhile.
const STRAYS_MAX: u32 = 256;
/// How often one fault may find no memory for its page.
const SHORTAGES_MAX: u32 = 5000;
/// The page of a VM on which no thread waits.
const NOBODY: u64 = u64::MAX;
const PAGE: u64 = PAGE_SIZE as u64;

/// What is mapped at a time, where it is resident anyway, in bytes.
const MAPPED_BYTES: u64 = 512 << 10;

/// Where a VM's memory comes from.
#[derive(Debug)]
pub(super) enum Source {
    /// The snapshot's bytes are copied.
    Copied(Box<File>),
    /// The image's memory is mapped.
    Mapped(Image),
}

/// What all VMs of a server share.
pub(super) struct VmShared<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) run_bytes: u64,
    pub(super) recorder: Option<&'a Mutex<Recorder>>,
    pub(super) replay: Option<&'a Trace>,
}

impl VmShared<'_> {
    /// Notes that a stretch was wanted, if that is recorded.
    fn note(&self, stretch: ImagePart) {
        if let Some(recorder) = self.recorder {
            let mut recorder = recorder.lock().unwrap_or_else(PoisonError::into_inner);
            recorder.note(stretch.offset, stretch.bytes);
        }
    }
}

/// What a VM wants after a turn.
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

/// One VM.
#[derive(Debug)]
pub(super) struct Vm {
    spaces: Vec<Space>,
    source: Source,
    inbox: MessageBuffer,
    /// Up to where the trace was supplied ahead, and up to where the snapshot was read for that.
    ahead: ReplayCursor,
    warm: ReplayCursor,
    numbers: Arc<Mutex<RestoreCounters>>,
    strays: u32,
    shortages: u32,
    is_short: bool,
    ended: Vec<Space>,
}

/// An address space of it.
#[derive(Debug)]
pub(super) struct Space {
    pub(super) uffd: Uffd,
    /// Whether its descriptor is watched.
    pub(super) is_watched: bool,
    pages: Pages,
    waiting: VecDeque<PendingFault>,
    is_over: bool,
}

/// A fault that was read and not answered.
#[derive(Clone, Copy, Debug)]
struct PendingFault {
    fault: Fault,
    since: Instant,
}

/// What became of an answer.
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

/// Why bytes are supplied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SupplyReason {
    Demand,
    Ahead,
}

impl Space {
    fn new(uffd: Uffd, pages: Pages) -> Self {
        Self { uffd, is_watched: false, pages, waiting: VecDeque::new(), is_over: false }
    }
}

impl Vm {
    /// One with these pages; what is done for it is counted in `numbers`, which others may look at.
    pub(super) fn new(
        uffd: Uffd,
        pages: Pages,
        source: Source,
        numbers: Arc<Mutex<RestoreCounters>>,
    ) -> Self {
        Self {
            spaces: vec![Space::new(uffd, pages)],
            source,
            inbox: MessageBuffer::default(),
            ahead: ReplayCursor::default(),
            warm: ReplayCursor::default(),
            numbers,
            strays: 0,
            shortages: 0,
            is_short: false,
            ended: Vec::new(),
        }
    }

    /// Bytes of its regions.
    pub(super) fn bytes(&self) -> u64 {
        self.spaces[0].pages.bytes()
    }

    /// Sees to it that no page of the image is seen before it came: has both kinds of fault told, whatever was asked
    /// for. Whether there was something to see to: a VM that is copied to has no image to see.
    pub(super) fn guard_image(&self) -> Result<bool, PeerError> {
        let Source::Mapped(_) = self.source else { return Ok(false) };
        let Space { uffd, pages, .. } = &self.spaces[0];
        for range in pages.ranges() {
            let address = range.start;
            uffd.watch(range).map_err(|source| PeerError::NotRegistered { address, source })?;
        }
        Ok(true)
    }

    /// Its address spaces; the first is the one it began with.
    pub(super) fn spaces(&mut self) -> &mut [Space] {
        &mut self.spaces
    }

    /// Spaces that have ended since this was asked last.
    pub(super) fn take_ended(&mut self) -> Vec<Space> {
        std::mem::take(&mut self.ended)
    }

    /// A turn: answers what waits, or supplies something ahead.
    pub(super) fn serve(&mut self, common: &VmShared<'_>) -> Result<NextWait, PeerError> {
        let mut answered = false;
        self.is_short = false;
        for _ in 0..ROUNDS_MAX {
            let mut messages = 0;
            for at in (0..self.spaces.len()).rev() {
                messages += self.round(at, common)?;
            }
            self.ended.extend(self.spaces.extract_if(.., |space| space.is_over));
            if self.spaces.is_empty() {
                return Ok(NextWait::Over);
            }
            answered |= messages > 0;
            match (messages, self.waits()) {
                (0, false) => break,
                _ if self.is_short => break,
                // The event has been read, and a thread that waits for that has not run yet.
                (0, true) => std::thread::yield_now(),
                _ => {}
            }
        }
        match self.waits() {
            true => Ok(NextWait::Soon),
            false if answered => Ok(self.next(common)),
            false => self.supply_ahead(common),
        }
    }

    fn waits(&self) -> bool {
        self.spaces.iter().any(|space| !space.waiting.is_empty())
    }

    fn next(&self, common: &VmShared<'_>) -> NextWait {
        match common.replay {
            Some(trace) if self.ahead.run < trace.runs().len() => NextWait::Ahead,
            _ => NextWait::Wait,
        }
    }

    /// Steps 1 to 4; see the head of this file. How many messages there were.
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
        self.start_reads(at, common.run_bytes);
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
                    break;
                }
            }
        }
        Ok(count)
    }

    /// Notes an event, or that a thread waits.
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
                self.count(|numbers| numbers.removed_bytes += bytes);
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

    /// Several faults wait: what they need is read side by side.
    fn start_reads(&self, at: usize, run_bytes: u64) {
        let Space { waiting, pages, .. } = &self.spaces[at];
        if waiting.len() < 2 {
            return;
        }
        for PendingFault { fault, .. } in waiting {
            if let PageNeed::Supply(ImagePart { offset, bytes, .. }) = pages.need(fault.address, run_bytes) {
                self.start_read(offset, bytes);
            }
        }
    }

    /// What cannot be read is told by the read that follows.
    fn start_read(&self, offset: u64, bytes: u64) {
        match &self.source {
            Source::Copied(file) => drop(file.will_need(offset, bytes)),
            Source::Mapped(image) => drop(image.prefetch(offset..offset + bytes)),
        }
    }

    fn count_answer(&mut self, since: Instant) {
        (self.strays, self.shortages) = (0, 0);
        let nanoseconds = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.count(|numbers| {
            numbers.faults += 1;
            numbers.latency.add(nanoseconds);
        });
    }

    fn count(&self, add: impl FnOnce(&mut RestoreCounters)) {
        add(&mut self.numbers.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn put_back(&mut self, at: usize, waiting: PendingFault) {
        self.count(|numbers| numbers.retries += 1);
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

    /// A thread that waits checks again. That none waits is no error.
    fn wake(&self, at: usize, address: u64, bytes: u64) {
        let _ = self.spaces[at].uffd.wake(address..address + bytes);
    }

    /// What one fault needs is done.
    fn answer(&mut self, at: usize, fault: Fault, common: &VmShared<'_>) -> Result<FaultAnswer, PeerError> {
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
        if let Source::Mapped(image) = &self.source {
            let image = image.clone();
            return self.map_fault(at, fault.address, &image, common);
        }
        if fault.kind == FaultKind::Minor {
            // The page is in a file of the VM's own, and so its bytes are, too.
            return self.give(at, page, unit, page, |uffd, range| uffd.resume(range));
        }
        match space.pages.need(fault.address, common.run_bytes) {
            PageNeed::Supply(stretch) => self.supply_demand(at, stretch, page, common),
            PageNeed::Zeros { address, bytes } => self.zeros(at, address, bytes, page),
            PageNeed::Look { address, bytes } => {
                self.count(|numbers| numbers.faults_present += 1);
                self.zeros(at, address, bytes, page)
            }
            PageNeed::Nowhere => Ok(FaultAnswer::Stray),
        }
    }

    /// Supplies `stretch`, or less of it but at least the page at `page`.
    fn supply_demand(
        &mut self,
        at: usize,
        stretch: ImagePart,
        page: u64,
        common: &VmShared<'_>,
    ) -> Result<FaultAnswer, PeerError> {
        let unit = self.spaces[at].pages.unit();
        let alone =
            ImagePart { address: page, offset: stretch.offset + (page - stretch.address), bytes: unit };
        let pinned = match self.pin(stretch, common)? {
            Err(_) if stretch != alone => self.pin(alone, common)?.map(|pinned| (alone, pinned)),
            other => other.map(|pinned| (stretch, pinned)),
        };
        let (stretch, pinned) = match pinned {
            Ok(pinned) => pinned,
            Err(error) if error.kind() == ErrorKind::NoMemory => return Ok(FaultAnswer::Short),
            Err(error) => return self.poison(at, alone, error),
        };
        common.note(stretch);
        self.supply(at, stretch, &pinned, page, SupplyReason::Demand)
    }

    /// The bytes of `stretch`, or why they cannot be had; they are the snapshot's.
    fn pin(&self, stretch: ImagePart, common: &VmShared<'_>) -> Result<Result<Pinned, Error>, PeerError> {
        let Source::Copied(file) = &self.source else { unreachable!("what is mapped is not copied") };
        let pinned = file.pin(stretch.offset, stretch.bytes as usize);
        let is_short = pinned.as_ref().is_ok_and(|pinned| (pinned.len() as u64) < stretch.bytes);
        if is_short || common.snapshot.assure().is_err() {
            return Err(PeerError::SnapshotChanged);
        }
        Ok(pinned)
    }

    /// Gives the pages of `stretch` what is pinned.
    fn supply(
        &mut self,
        at: usize,
        stretch: ImagePart,
        pinned: &Pinned,
        page: u64,
        why: SupplyReason,
    ) -> Result<FaultAnswer, PeerError> {
        let unit = self.spaces[at].pages.unit();
        let (mut address, mut found) = (stretch.address, FaultAnswer::Given);
        for piece in whole_units(pinned.chunks(), unit as usize) {
            let piece: &[u8] = &piece;
            for part in same_kind(piece, unit as usize) {
                let (from, is_zero) = part;
                let bytes = from.len() as u64;
                let answer = if is_zero {
                    self.zeros(at, address, bytes, page)?
                } else {
                    let begin = address;
                    self.give(at, begin, bytes, page, |uffd, range| {
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
                self.count(|numbers| match why {
                    SupplyReason::Demand => numbers.demand_bytes += bytes,
                    SupplyReason::Ahead => numbers.ahead_bytes += bytes,
                });
            }
        }
        Ok(found)
    }

    /// Gives pages zeros.
    fn zeros(&mut self, at: usize, address: u64, bytes: u64, page: u64) -> Result<FaultAnswer, PeerError> {
        let unit = self.spaces[at].pages.unit();
        self.count(|numbers| numbers.zero_bytes += bytes);
        if unit == PAGE {
            return self.give(at, address, bytes, page, |uffd, range| uffd.zero(range));
        }
        // Large pages have no page of zeros to share.
        let zeros = vec![0; unit as usize];
        self.give(at, address, bytes, page, |uffd, range| uffd.copy(range.start, &zeros))
    }

    /// Supplies `bytes` bytes at `address` by `call`, from page to page that is there already; a thread that waits for
    /// `page` is woken in any case.
    fn give(
        &mut self,
        at: usize,
        address: u64,
        bytes: u64,
        page: u64,
        call: impl Fn(&Uffd, Range<u64>) -> CopyResult,
    ) -> Result<FaultAnswer, PeerError> {
        let (space, end) = (&mut self.spaces[at], address + bytes);
        let unit = space.pages.unit();
        let (mut from, mut step, mut answer) = (address, bytes, FaultAnswer::Given);
        while from < end {
            let CopyResult { bytes, stop } = call(&space.uffd, from..end.min(from + step));
            match stop {
                None => space.pages.supplied(from..from + bytes),
                Some(CopyStop::Present) => {
                    if from == page {
                        let _ = space.uffd.wake(page..page + unit);
                    }
                    space.pages.supplied(from..from + unit);
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

    /// Answers a fault in a mapping of the image.
    fn map_fault(
        &mut self,
        at: usize,
        address: u64,
        image: &Image,
        common: &VmShared<'_>,
    ) -> Result<FaultAnswer, PeerError> {
        let pages = &self.spaces[at].pages;
        let unit = pages.unit();
        let page = address & !(unit - 1);
        let (wide, stretch) = match (pages.need(address, MAPPED_BYTES), pages.need(address, common.run_bytes))
        {
            (PageNeed::Supply(wide), PageNeed::Supply(stretch)) => (wide, stretch),
            // It was mapped. Perhaps it was given back without an event; perhaps another thread was
            // faster.
            (PageNeed::Look { address, bytes } | PageNeed::Zeros { address, bytes }, _) => {
                self.count(|numbers| numbers.faults_present += 1);
                return self.give(at, address, bytes, page, |uffd, range| uffd.resume(range));
            }
            _ => return Ok(FaultAnswer::Stray),
        };
        let is_resident = image.is_resident(wide.offset..wide.offset + wide.bytes);
        let stretch = if is_resident { wide } else { stretch };
        common.note(stretch);
        self.map(at, stretch, page, image, SupplyReason::Demand)
    }

    /// Makes a stretch of the image resident, and maps what came of it.
    fn map(
        &mut self,
        at: usize,
        stretch: ImagePart,
        page: u64,
        image: &Image,
        why: SupplyReason,
    ) -> Result<FaultAnswer, PeerError> {
        let ImagePart { address, offset, bytes } = stretch;
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
            let len = range.end - range.start;
            match self
                .give(at, range.start - offset + address, len, page, |uffd, range| uffd.resume(range))?
            {
                FaultAnswer::Given => {}
                FaultAnswer::Stray => found = FaultAnswer::Stray,
                other => return Ok(other),
            }
            self.count(|numbers| {
                numbers.mapped_bytes += len;
                match why {
                    SupplyReason::Demand => numbers.demand_bytes += len,
                    SupplyReason::Ahead => numbers.ahead_bytes += len,
                }
            });
        }
        let is_there = why == SupplyReason::Ahead || there.iter().any(|range| range.contains(&wanted));
        match failed {
            Some(error) if !is_there && error.kind() == ErrorKind::NoMemory => Ok(FaultAnswer::Short),
            Some(error) if !is_there => {
                let unit = self.spaces[at].pages.unit();
                self.poison(at, ImagePart { address: page, offset: wanted, bytes: unit }, error)
            }
            _ => Ok(found),
        }
    }

    /// The page of `stretch` cannot be read: a touch of it is a bus error from now on.
    fn poison(&mut self, at: usize, stretch: ImagePart, source: Error) -> Result<FaultAnswer, PeerError> {
        let ImagePart { address, offset, bytes } = stretch;
        let poisoned = self.give(at, address, bytes, address, |uffd, range| uffd.poison(range));
        match poisoned {
            Err(PeerError::Kernel { source: poison, .. }) => {
                Err(PeerError::Unreadable { offset, source, poison })
            }
            Ok(FaultAnswer::Given) => {
                self.count(|numbers| numbers.poisoned_bytes += bytes);
                Ok(FaultAnswer::Given)
            }
            other => other,
        }
    }

    /// Step 5: supplies the next piece of the trace, as far as it is absent.
    fn supply_ahead(&mut self, common: &VmShared<'_>) -> Result<NextWait, PeerError> {
        let Some(trace) = common.replay else { return Ok(NextWait::Wait) };
        self.warm(trace.runs());
        let mut left = AHEAD_BYTES;
        for _ in 0..AHEAD_RUNS {
            let mut ahead = self.ahead;
            let Some((offset, bytes)) = ahead.take(trace.runs(), left) else { break };
            match self.supply_part(offset, bytes, common)? {
                // What could not be supplied is absent still; a thread that wants it will get the
                // error.
                FaultAnswer::Given | FaultAnswer::Stray => self.ahead = ahead,
                FaultAnswer::Over => return Ok(NextWait::Over),
                FaultAnswer::Again | FaultAnswer::Short => return Ok(NextWait::Soon),
            }
            left -= bytes;
        }
        Ok(self.next(common))
    }

    /// Supplies what is absent of `bytes` bytes of the image at `offset`.
    fn supply_part(
        &mut self,
        offset: u64,
        bytes: u64,
        common: &VmShared<'_>,
    ) -> Result<FaultAnswer, PeerError> {
        let mut found = FaultAnswer::Given;
        for stretch in self.spaces[0].pages.absent_in(offset, bytes) {
            // A thread may wait for one of its pages since; the kernel wakes it when the page is
            // supplied.
            let answer = match &self.source {
                Source::Copied(_) => match self.pin(stretch, common)? {
                    Ok(pinned) => self.supply(0, stretch, &pinned, NOBODY, SupplyReason::Ahead)?,
                    Err(error) if error.kind() == ErrorKind::NoMemory => FaultAnswer::Short,
                    Err(_) => FaultAnswer::Stray,
                },
                Source::Mapped(image) => {
                    let image = image.clone();
                    self.map(0, stretch, NOBODY, &image, SupplyReason::Ahead)?
                }
            };
            match answer {
                FaultAnswer::Given => {}
                FaultAnswer::Stray => found = FaultAnswer::Stray,
                other => return Ok(other),
            }
        }
        Ok(found)
    }

    /// Has the snapshot read for what is supplied ahead soon.
    fn warm(&mut self, runs: &[ImageRun]) {
        if self.warm.passed < self.ahead.passed {
            self.warm = self.ahead;
        }
        for _ in 0..AHEAD_RUNS {
            let capacity = (self.ahead.passed + WARM_BYTES).saturating_sub(self.warm.passed);
            let Some((offset, bytes)) = self.warm.take(runs, capacity.min(AHEAD_BYTES)) else { return };
            self.start_read(offset, bytes);
        }
    }
}

/// How far the replay of a trace has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct ReplayCursor {
    run: usize,
    /// Bytes of that run that it has passed.
    inside: u64,
    /// Bytes of all runs that it has passed.
    passed: u64,
}

impl ReplayCursor {
    /// Passes the next part of a run, `bytes_max` bytes at most: where it is in the image, and its length. `None` at
    /// the end, and of nothing.
    fn take(&mut self, runs: &[ImageRun], bytes_max: u64) -> Option<(u64, u64)> {
        let run = runs.get(self.run).filter(|_| bytes_max > 0)?;
        let (first, len) = (u64::from(run.first) * PAGE, u64::from(run.pages) * PAGE);
        let (offset, bytes) = (first + self.inside, bytes_max.min(len - self.inside));
        self.inside += bytes;
        self.passed += bytes;
        if self.inside == len {
            (self.run, self.inside) = (self.run + 1, 0);
        }
        Some((offset, bytes))
    }
}

/// Bytes that are lent, or that were put together.
enum SuppliedBytes<'a> {
    Lent(&'a [u8]),
    Joined(Vec<u8>),
}

impl std::ops::Deref for SuppliedBytes<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Self::Lent(bytes) => bytes,
            Self::Joined(bytes) => bytes,
        }
    }
}

/// `chunks` again, cut at multiples of `unit`; a unit that lies in several of them is put together. All of them
/// together are whole units.
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
            pieces.push(SuppliedBytes::Lent(whole));
        }
        open.extend_from_slice(rest);
        pieces
    })
}

/// Bytes as stretches of whole pages that are all zeros, and of others. Of large pages none is asked: they cannot
/// be shared.
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

/// Whether all bytes are zeros; of most pages that are not, the first bytes say so.
fn is_zero(page: &[u8]) -> bool {
    page.chunks(256).all(|some| some.iter().fold(0, |all, byte| all | byte) == 0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn units_are_whole_and_in_order(cuts in prop::collection::vec(1..30_usize, 1..20), unit in 1..9_usize) {
            let len = cuts.iter().sum::<usize>().next_multiple_of(unit);
            let bytes: Vec<u8> = (0..len).map(|i| i as u8).collect();
            let (mut chunks, mut rest) = (Vec::new(), &bytes[..]);
            for &cut in &cuts {
                let (chunk, behind) = rest.split_at(cut);
                chunks.push(chunk);
                rest = behind;
            }
            chunks.push(rest);
            let pieces: Vec<SuppliedBytes<'_>> = whole_units(chunks.into_iter(), unit).collect();
            prop_assert!(pieces.iter().all(|piece| !piece.is_empty() && piece.len().is_multiple_of(unit)));
            prop_assert_eq!(pieces.iter().flat_map(|piece| piece.iter().copied()).collect::<Vec<_>>(), bytes);
        }

        #[test]
        fn a_cursor_passes_each_page_of_a_trace_once(
            runs in prop::collection::vec((0..1000_u32, 1..50_u32), 0..8),
            steps in prop::collection::vec(1..40_u64, 1..200),
        ) {
            let runs: Vec<ImageRun> = runs.iter().map(|&(first, pages)| ImageRun { first, pages }).collect();
            let pages = |run: &ImageRun| u64::from(run.first)..u64::from(run.first + run.pages);
            let naive: Vec<u64> = runs.iter().flat_map(pages).collect();
            let (mut cursor, mut found) = (ReplayCursor::default(), Vec::new());
            for step in steps {
                let Some((offset, bytes)) = cursor.take(&runs, step * PAGE) else { break };
                prop_assert!(bytes > 0 && bytes <= step * PAGE);
                found.extend(offset / PAGE..(offset + bytes) / PAGE);
                prop_assert_eq!(cursor.passed, found.len() as u64 * PAGE);
            }
            prop_assert_eq!(&found[..], &naive[..found.len()]);
            prop_assert_eq!(cursor.run == runs.len(), found.len() == naive.len());
        }

        #[test]
        fn stretches_are_of_one_kind_and_as_long_as_can_be(pages in prop::collection::vec(0..3_u8, 1..12)) {
            let mut bytes = vec![0; pages.len() * PAGE_SIZE];
            for (number, &kind) in pages.iter().enumerate() {
                // A page whose last byte alone is not zero is none of zeros.
                let at = number * PAGE_SIZE + if kind == 1 { PAGE_SIZE - 1 } else { 0 };
                bytes[at] = kind;
            }
            let parts = same_kind(&bytes, PAGE_SIZE);
            let naive: Vec<bool> = pages.iter().map(|&kind| kind == 0).collect();
            let found: Vec<bool> =
                parts.iter().flat_map(|(part, kind)| vec![*kind; part.len() / PAGE_SIZE]).collect();
            prop_assert_eq!(found, naive);
            prop_assert!(parts.windows(2).all(|pair| pair[0].1 != pair[1].1));
            prop_assert_eq!(parts.iter().map(|(part, _)| part.len()).sum::<usize>(), bytes.len());
        }
    }
}

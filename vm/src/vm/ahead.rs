//! Ahead: the pages that a VM gets before it asks, and how they are chosen.
//!
//! ```text
//!   a fault was answered --> in a stream?  its window      among the last windows, first come, first supplied
//!                            in a dense region?  the rest
//!   no fault waits       --> 1 windows     2 the record    3 the rest of the image, from its beginning
//!                            a step of 128 KiB, or of 512 KiB if the VM waits for just that
//! ```
//!
//! **Dense regions.** When faults have brought half of some 2 MiB of the image, the rest of them is supplied unasked,
//! in large pieces: a VM that touches pages here and there in all of its memory makes half of the faults then, and one
//! that touches few pages gets no more of them.
//!
//! While a record is **replayed**, a page that it names is answered alone, too: the record names what will be wanted
//! around it, and the rest would take the time from it.
//!
//! **Steps**, in this order: the windows of streams (`streams`) and dense regions, the record (`replay`), and, if all
//! is to be filled, the rest from its beginning. Each step is [`AHEAD_BYTES`] at most, and between two of them the
//! faults are looked for. If the last fault was in a stream, or of the record, or of what is filled next, the VM is
//! right behind, and to look for each of its faults would hold up both: steps are [`AHEAD_BYTES_MAX`] then. A step
//! waits for no device: what has not come is looked for again in a moment. (Except what was evicted three times before
//! it could be supplied, and any step of an image that VMs map: it is read as one, if it was not read before.) Bytes of
//! an object are never waited for: a part that was absent three times, after pauses, is left to its faults. A turn of a
//! VM whose faults never end has such a step after each of them.
//!
//! While the order of pages is **recorded**, each page is answered alone, and nothing comes unasked but a replayed
//! record: a page that was never touched must not look as if it had been.
//!
//! Not an invariant: that a page is absent when its step comes. A fault may have been faster.

use std::ops::Range;
use std::time::{Duration, Instant};

use quinion::internals::units::PAGE_SIZE;
use quinion::{ErrorKind, ReadOptions};

use super::bytes::{SnapshotBytes, same_parts};
use super::{FaultAnswer, FaultedPage, PAGE, Source, SupplyRequest, Vm, VmShared};
use crate::fault_record::{RecordedPage, digest};
use crate::pages::ImagePart;
use crate::replay::Replay;
use crate::streams::{ReadaheadLimits, StreamStep, WINDOW_BYTES_MAX};
use crate::{Event, Fill, PeerError};

/// Bytes that are supplied ahead between two looks for faults.
pub(super) const AHEAD_BYTES: u64 = 128 << 10;
/// Like `AHEAD_BYTES`, when the VM waits for just that. A fault of anything else waits for such a step once.
pub(super) const AHEAD_BYTES_MAX: u64 = 512 << 10;
/// Steps of [`AHEAD_BYTES`] in one turn.
pub(super) const AHEAD_STEPS: u64 = 4;
const AHEAD_RUNS: usize = 64;
/// How far before what is supplied unasked the snapshot is read, in bytes, at least. A fault's own read waits behind
/// them.
pub(in super::super) const WARM_BYTES: u64 = 8 << 20;
/// Windows of streams, and neighbours that had not come, that wait to be supplied. Older ones are left to their faults.
const WINDOWS_MAX: usize = 8;
/// The size of a neighbourhood in the image, and how much of it is absent at most when the rest is supplied ahead.
pub(super) const DENSE_BYTES: u64 = 2 << 20;
pub(super) const DENSE_ABSENT_MAX: u64 = DENSE_BYTES / 2;
/// How often what is supplied unasked may be found absent before it is waited for.
const ABSENCES_MAX: u32 = 3;
/// The pause before what is absent is asked for again, if its reads may hang: a store that fails is not asked at once.
const ABSENT_PAUSE: Duration = Duration::from_millis(300);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AheadStep {
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
    /// The bytes are there.
    Yes(T),
    /// The bytes are on their way, or there is no memory for them now.
    Later,
    /// The bytes cannot be had.
    Never,
}

/// Pages whose bytes were compared with a replayed record.
#[derive(Clone, Copy, Debug)]
struct ComparedPages {
    compared: u64,
    differing: u64,
}

impl Vm {
    pub(super) fn want_window(&mut self, window: Range<u64>) {
        if self.windows.len() == WINDOWS_MAX {
            self.windows.pop_front();
        }
        self.windows.push_back(window);
    }

    /// A fault was answered in a run of the image that was absent: what lies around its page comes next, and, if the VM
    /// walks there, what lies behind it.
    pub(super) fn note_answer(&mut self, fault: FaultedPage, run: ImagePart, common: &VmShared<'_>) {
        let FaultedPage { at, page, .. } = fault;
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
            // The window is asked for again: pages that were refused or evicted since are absent, and the rest costs a
            // look.
            self.read_ahead([window.start..window.end.min(reads.start), reads], common);
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

    /// If the region of a fault's answer at `offset` is dense, its absent pages come next.
    fn note_dense_region(&mut self, offset: u64, image_bytes: u64, common: &VmShared<'_>) {
        let begin = offset / DENSE_BYTES * DENSE_BYTES;
        let end = (begin + DENSE_BYTES).min(image_bytes);
        let is_coming = |window: &Range<u64>| window.start < end && begin < window.end;
        if self.windows.iter().any(is_coming) {
            return;
        }
        let absent = self.spaces[0].pages.absent_in(begin, end - begin);
        let absent: u64 = absent.iter().map(|part| part.bytes).sum();
        if absent <= DENSE_ABSENT_MAX {
            self.read_ahead(std::iter::once(begin..end), common);
            self.want_window(begin..end);
        }
    }

    /// Starts reads of ranges that will be wanted, each unless the kernel holds its first page and its last.
    pub(super) fn will_want(&self, ranges: &[Range<u64>], common: &VmShared<'_>) {
        match &self.source {
            // Those that lie close to each other are one request to a store.
            Source::Copied(file) if common.snapshot.reads_may_hang() => drop(file.will_need_ranges(ranges)),
            _ => ranges.iter().for_each(|range| self.will_want_one(range, common)),
        }
    }

    fn will_want_one(&self, range: &Range<u64>, common: &VmShared<'_>) {
        let mut page = [0; PAGE_SIZE];
        let mut is_held = |offset| common.snapshot.copy_held(&mut page, offset);
        let last = (range.end - 1) / PAGE * PAGE;
        if !is_held(range.start) || (last > range.start && !is_held(last)) {
            self.start_read(range.start, range.end - range.start);
        }
    }

    /// Starts reads of bytes that the VM will want, by whole folios. Of each folio they begin with the first page that
    /// the VM lacks and end with the last, so none goes beyond the VM's memory.
    fn read_ahead(&mut self, reads: impl IntoIterator<Item = Range<u64>>, common: &VmShared<'_>) {
        let mut wanted = Vec::new();
        for Range { mut start, end: behind } in reads {
            while start < behind {
                let end = (start + 1).next_multiple_of(WINDOW_BYTES_MAX).min(behind);
                let absent = self.spaces[0].pages.absent_in(start, end - start);
                let first = absent.iter().map(|part| part.offset).min();
                let last = absent.iter().map(|part| part.offset + part.bytes).max();
                wanted.extend(first.zip(last).map(|(first, last)| first..last));
                start = end;
            }
        }
        self.will_want(&wanted, common);
    }

    /// The read that follows tells of errors.
    pub(super) fn start_read(&self, offset: u64, bytes: u64) {
        match &self.source {
            Source::Copied(file) => drop(file.will_need(offset, bytes)),
            Source::Mapped(image) => drop(image.prefetch(offset..offset + bytes)),
        }
    }

    /// Step 6: supplies the next piece of what is supplied unasked, as far as it is absent.
    pub(super) fn supply_ahead(&mut self, common: &VmShared<'_>) -> Result<AheadStep, PeerError> {
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
        self.read_ahead([reads], common);
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
        // If a large step has not come as a whole, its first part may have. An image's is waited for as one.
        let ready = if large == part { None } else { self.ready(large, common)? };
        if ready.is_some() || self.is_mapped() {
            part = large;
        }
        let behind = part.offset + part.bytes;
        let answer = if self.is_mapped() {
            self.map(SupplyRequest::ahead(part), common)?
        } else if let Some(bytes) = ready {
            self.forget_absences();
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
            FaultAnswer::Short | FaultAnswer::Reading => (AheadStep::Later, part.offset),
            FaultAnswer::Over => (AheadStep::Over, part.offset),
        })
    }

    fn ready_ahead(
        &mut self,
        part: ImagePart,
        common: &VmShared<'_>,
    ) -> Result<Ready<SnapshotBytes>, PeerError> {
        if let Some(bytes) = self.ready(part, common)? {
            self.forget_absences();
            return Ok(Ready::Yes(bytes));
        }
        let hangs = common.snapshot.reads_may_hang();
        let Source::Copied(file) = &self.source else { unreachable!("what is mapped is not copied") };
        // This takes what has come off the device's queue, too.
        let residency = file.residency(part.offset, part.bytes).unwrap_or_default();
        if residency.filling_pages > 0 {
            return Ok(Ready::Later);
        }
        // All of it is there; a lock was busy before.
        let is_there = residency.pages > 0 && residency.cached_pages == residency.pages;
        if !is_there && self.absent_since.is_some_and(|since| since.elapsed() < ABSENT_PAUSE) {
            return Ok(Ready::Later);
        }
        self.absences += 1;
        self.absent_since = hangs.then(Instant::now);
        if !is_there && self.absences <= ABSENCES_MAX {
            self.start_read(part.offset, part.bytes);
            return Ok(Ready::Later);
        }
        // It was evicted again and again, or cannot be read: that is found out by waiting for it, or by a fault.
        self.forget_absences();
        if hangs && !is_there {
            return Ok(Ready::Never);
        }
        Ok(match self.bytes_of(part, ReadOptions::new().cached_only(hangs), common)? {
            Ok(bytes) => Ready::Yes(bytes),
            Err(error) if matches!(error.kind(), ErrorKind::NoMemory | ErrorKind::WouldBlock) => Ready::Later,
            Err(_) => Ready::Never,
        })
    }

    fn forget_absences(&mut self) {
        (self.absences, self.absent_since) = (0, None);
    }

    fn supply_replayed(&mut self, replay: &Replay, common: &VmShared<'_>) -> Result<AheadStep, PeerError> {
        let reads = self.replayed.warm(replay, common.replay_ahead_bytes);
        self.read_ahead(reads, common);
        let mut left = self.ahead_bytes;
        for _ in 0..AHEAD_RUNS {
            let Some(run) = self.replayed.next(replay, left) else { break };
            match self.supply_run(replay, run, common)? {
                FaultAnswer::Given | FaultAnswer::Stray => self.replayed.pass(replay, run.len()),
                FaultAnswer::Again => return Ok(AheadStep::Done),
                // If a large step has not come as a whole, its first part may have.
                FaultAnswer::Short if run.len() as u64 * PAGE > AHEAD_BYTES => {
                    left = AHEAD_BYTES;
                    continue;
                }
                FaultAnswer::Short | FaultAnswer::Reading => return Ok(AheadStep::Later),
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
                    self.map(SupplyRequest::ahead(same), common)?
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
            return Err(common.snapshot.change().into());
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
            (common.emit_event)(&Event::ReplayStale { differing, compared });
        }
    }
}

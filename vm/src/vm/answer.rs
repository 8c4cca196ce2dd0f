//! Answer: what a fault needs, given to the kernel: bytes of the snapshot, zeros, a mapping of the image, or poison.
//!
//! ```text
//!   copied    held by the kernel's cache? copy   else cached? pin   else read, and wait --> the page --> UFFDIO_COPY
//!             (an object's page is read, and not waited for: `page_read`; where no more may be pinned, a copy is read)
//!   zeros     a page that was given back, or that is zeros in the snapshot                         --> UFFDIO_ZEROPAGE
//!   mapped    make the page resident in the image                                                  --> UFFDIO_CONTINUE
//!   no bytes  the device fails                                                                      --> UFFDIO_POISON
//! ```
//!
//! **The wanted page first.** An answer is the page that a thread waits for, and nothing else: the thread runs on while
//! its neighbours are supplied. The reads of all of them were started before, as one. The page is pinned, or copied
//! from the kernel's cache; then the snapshot is checked, and the kernel given the bytes. Pages of zeros are not copied
//! but asked for. An unreadable page is poisoned. Neighbours are supplied only when they have come.
//!
//! A VM that has mapped the **image** needs no bytes: its pages are made resident in the image, and mapped, with what
//! is resident around them. Memory that it gives back shows the image again, as any private mapping of a file does; a
//! VMM that wants zeros there maps something else over it.
//!
//! Invariant: the snapshot is checked after its bytes were read and before the kernel has them.

use std::ops::{ControlFlow, Range};
use std::time::Instant;

use quinion::{Error, ErrorKind, File, ReadOptions};

use super::ahead::AHEAD_BYTES;
use super::bytes::{SnapshotBytes, same_kind, whole_units};
use super::{
    FaultAnswer, FaultedPage, NO_PAGE, PAGE, PendingFault, Source, SupplyReason, SupplyRequest, Vm, VmShared,
};
use crate::PeerError;
use crate::pages::{ImagePart, PageNeed};
use crate::replay::Replay;
use crate::snapshot::is_damage;
use crate::uffd::{FaultKind, Uffd};

/// Bytes that are mapped at a time, where they are resident anyway.
const MAPPED_BYTES: u64 = 512 << 10;

impl VmShared<'_> {
    /// A read for a fault of then has failed: it is begun anew, unless that has been done for long enough.
    fn try_again(&self, offset: u64, since: Instant, source: Error) -> Result<FaultAnswer, PeerError> {
        let waited = since.elapsed();
        if waited < self.retry_reads {
            return Ok(FaultAnswer::Reading);
        }
        Err(PeerError::SourceFailed { name: self.snapshot.name().to_owned(), offset, waited, source })
    }
}

/// Fills `into`, up to the end of the file. How much it read.
fn read_all(file: &File, into: &mut [u8], offset: u64, options: ReadOptions) -> Result<usize, Error> {
    let mut done = 0;
    while done < into.len() {
        match file.read_at_with(&mut into[done..], offset + done as u64, options)? {
            0 => break,
            read => done += read,
        }
    }
    Ok(done)
}

impl Vm {
    pub(super) fn answer(
        &mut self,
        at: usize,
        PendingFault { fault, since, .. }: PendingFault,
        common: &VmShared<'_>,
    ) -> Result<FaultAnswer, PeerError> {
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
            return self.map_fault(FaultedPage { at, page, since }, common);
        }
        if fault.kind == FaultKind::Minor {
            // The page is in a file of the VM's own, and so its bytes are, too.
            return self.spaces[at].give(page..page + unit, page, Uffd::resume);
        }
        match self.spaces[at].pages.need(fault.address, common.run_bytes) {
            PageNeed::Supply(run) => {
                let run = self.run_of(run, run.page(page, unit), common);
                self.supply_demand(FaultedPage { at, page, since }, run, common)
            }
            PageNeed::Zeros { address, bytes } => self.zeros(at, address..address + bytes, page),
            PageNeed::CheckPresent { address, bytes } => {
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
        let FaultedPage { at, page, since } = fault;
        let alone = run.page(page, self.spaces[at].pages.unit());
        let bytes = match self.ready(alone, common)? {
            Some(bytes) => bytes,
            None => match self.read_page(alone, run, common)? {
                Some(Ok(bytes)) => bytes,
                None => return Ok(FaultAnswer::Reading),
                Some(Err(error)) if error.kind() == ErrorKind::NoMemory => return Ok(FaultAnswer::Short),
                Some(Err(error))
                    if common.snapshot.reads_may_hang()
                        && !common.retry_reads.is_zero()
                        && !is_damage(&error) =>
                {
                    return common.try_again(alone.offset, since, error);
                }
                Some(Err(error)) => return self.poison(SupplyRequest::demand(fault, alone), error, common),
            },
        };
        self.reads.remove(&alone.offset);
        common.note(alone.offset, bytes.chunks());
        let answer = self.supply(SupplyRequest::demand(fault, alone), bytes)?;
        if answer == FaultAnswer::Given {
            self.note_answer(fault, run, common);
        }
        Ok(answer)
    }

    /// Reads the page `alone` of `run`; `None` if it is on its way, and is not waited for.
    fn read_page(
        &mut self,
        alone: ImagePart,
        run: ImagePart,
        common: &VmShared<'_>,
    ) -> Result<Option<Result<SnapshotBytes, Error>>, PeerError> {
        if common.snapshot.reads_may_hang() {
            return self.poll_page(alone, run, common);
        }
        if run != alone {
            // One read for all of it.
            self.start_read(run.offset, run.bytes);
        }
        self.bytes_of(alone, ReadOptions::default(), common).map(Some)
    }

    /// The bytes of `part`, or why they cannot be had; they are the snapshot's. Where no more may be pinned they are
    /// copied: the pins of the cache's other clients have one share with these, and may be kept for long.
    pub(super) fn bytes_of(
        &mut self,
        part: ImagePart,
        options: ReadOptions,
        common: &VmShared<'_>,
    ) -> Result<Result<SnapshotBytes, Error>, PeerError> {
        let Source::Copied(file) = &self.source else { unreachable!("what is mapped is not copied") };
        let len = part.bytes as usize;
        let bytes = match file.pin_with(part.offset, len, options) {
            Err(error) if error.kind() == ErrorKind::NoMemory => {
                self.buffer.resize(self.buffer.len().max(len), 0);
                let read = read_all(file, &mut self.buffer[..len], part.offset, options);
                read.map(|len| SnapshotBytes::Copied { buffer: std::mem::take(&mut self.buffer), len })
            }
            pinned => pinned.map(SnapshotBytes::Pinned),
        };
        Self::checked(bytes, part, common)
    }

    /// `bytes`, those of `part`, if the snapshot is what it was in the beginning.
    pub(super) fn checked(
        bytes: Result<SnapshotBytes, Error>,
        part: ImagePart,
        common: &VmShared<'_>,
    ) -> Result<Result<SnapshotBytes, Error>, PeerError> {
        let is_other = match &bytes {
            Ok(bytes) => (bytes.len() as u64) < part.bytes,
            Err(error) => common.snapshot.note_failure(error),
        };
        if is_other {
            return Err(common.snapshot.change().into());
        }
        common.snapshot.assure()?;
        Ok(bytes)
    }

    pub(super) fn ready(
        &mut self,
        part: ImagePart,
        common: &VmShared<'_>,
    ) -> Result<Option<SnapshotBytes>, PeerError> {
        if self.is_mapped() {
            return Ok(None);
        }
        let (mut buffer, len) = (std::mem::take(&mut self.buffer), part.bytes as usize);
        buffer.resize(buffer.len().max(len), 0);
        if common.snapshot.copy_held(&mut buffer[..len], part.offset) {
            common.snapshot.assure()?;
            return Ok(Some(SnapshotBytes::Copied { buffer, len }));
        }
        self.buffer = buffer;
        Ok(self.bytes_of(part, ReadOptions::new().cached_only(true), common)?.ok())
    }

    pub(super) fn supply(
        &mut self,
        request: SupplyRequest,
        bytes: SnapshotBytes,
    ) -> Result<FaultAnswer, PeerError> {
        let answer = self.supply_chunks(request, bytes.chunks());
        self.recycle(bytes);
        answer
    }

    pub(super) fn recycle(&mut self, bytes: SnapshotBytes) {
        if let SnapshotBytes::Copied { buffer, .. } = bytes {
            self.buffer = buffer;
        }
    }

    pub(super) fn supply_chunks<'b>(
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

    fn map_fault(&mut self, fault: FaultedPage, common: &VmShared<'_>) -> Result<FaultAnswer, PeerError> {
        let FaultedPage { at, page, .. } = fault;
        let pages = &self.spaces[at].pages;
        let unit = pages.unit();
        let run = match pages.need(page, common.run_bytes) {
            PageNeed::Supply(run) => run,
            // It was mapped. It was given back without an event, or another thread was faster.
            PageNeed::CheckPresent { address, bytes } | PageNeed::Zeros { address, bytes } => {
                self.count(|counters| counters.faults_present += 1);
                return self.spaces[at].give(address..address + bytes, page, Uffd::resume);
            }
            PageNeed::Nowhere => return Ok(FaultAnswer::Stray),
        };
        let wide = match pages.need(page, MAPPED_BYTES) {
            PageNeed::Supply(wide) if common.recorder.is_none() && self.is_resident(wide) => wide,
            _ => run,
        };
        let alone = run.page(page, unit);
        if run != alone && !self.is_resident(run) {
            self.start_read(run.offset, run.bytes);
        }
        let answer = self.map(SupplyRequest::demand(fault, alone), common)?;
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

    pub(super) fn map(
        &mut self,
        request: SupplyRequest,
        common: &VmShared<'_>,
    ) -> Result<FaultAnswer, PeerError> {
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
            return Err(common.snapshot.change().into());
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
                let alone = ImagePart { address: page, offset: wanted, bytes: unit };
                self.poison(SupplyRequest { part: alone, ..request }, error, common)
            }
            _ => Ok(found),
        }
    }

    fn poison(
        &mut self,
        request: SupplyRequest,
        source: Error,
        common: &VmShared<'_>,
    ) -> Result<FaultAnswer, PeerError> {
        let SupplyRequest { at, part: ImagePart { address, offset, bytes }, .. } = request;
        let poisoned = self.spaces[at].give(address..address + bytes, address, Uffd::poison);
        match poisoned {
            Err(PeerError::Kernel { source: poison, .. }) => {
                Err(PeerError::Unreadable { offset, source, poison })
            }
            Ok(FaultAnswer::Given) => {
                self.count(|counters| counters.poisoned_bytes += bytes);
                (common.report_poisoned)(offset..offset + bytes, source);
                Ok(FaultAnswer::Given)
            }
            other => other,
        }
    }
}

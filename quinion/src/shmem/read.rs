//! Read: the reads of a memory file that were no hit.
//!
//! ```text
//!   index      5   6   7   8   9  10  11  12  13  14          wanted: 6 to 14
//!              [- F -]  .   .  [-- A --]  [L]  [G]
//!                   |---|                                     batch: F               bytes
//!                        |-----|                              one lookup under lock  zeros, both pages at once
//!                              |--------|                     batch: A, allocated    zeros, all of it at once
//!                                         |----|              L is being filled: the batch ended before it; it is
//!                                                             waited for when it is the first
//! ```
//!
//! A spilled page is brought back, or, if there is no memory for it, read where it is; a call that has found none reads
//! so all that follows.
//!
//! Each folio of a batch is looked at before it is copied: up to date, allocated, or on its way. To read a folio
//! without bytes as zeros is right in every race: a moment before it was zeros. An empty batch says nothing; the tree
//! is asked under its lock, once for each hole.
//!
//! The size is read before a batch is gathered and after its copy, and the lesser counts: a thread that extends a file
//! first zeroes the bytes behind its end; one that cuts it stores the size before it releases a page. A read that has
//! met an end within a page is over, though the file be longer by then: a page is read as it was at one moment.
//!
//! Cost: for a hole of any length one hold of the tree's lock and one way down. For folios, a slot and a hold each.
//! The common read is a hit and does not come here.

use std::ops::Range;
use std::sync::Arc;

use crate::arena::{HOLDS_MAX, HoldRefused, ReadableState};
use crate::error::{Error, Repr};
use crate::filemap::{HitStop, SpillIn, TruncateExclusion};
use crate::folio::HeldFolio;
use crate::mapping::{BatchEnd, Mapping, MemoryEntry, ReadBatch};
use crate::units::{PAGE_SIZE, PageIndex, met_end_within_page, pages_of_bytes};

use super::{Shmem, Target};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ReadStep {
    /// How many bytes were read; 0: look again.
    Read(usize),
    /// No folio was found, and it takes the lock to say more.
    Absent,
}

/// How a call reads spilled pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SpilledReads {
    ComeBack,
    /// There was no memory for one of them: they are read where they are.
    Stay,
}

/// A read of bytes where no folio was found.
struct MissedBytes<'r> {
    mapping: &'r Arc<Mapping>,
    wanted: Range<u64>,
    spilled: &'r mut SpilledReads,
}

impl Shmem {
    /// Reads the file's bytes from `position` on, as far as `target` takes them; returns how many. `stopped` is why the
    /// hits before it ended, if there were any. Waits for a caller that is just filling a page.
    ///
    /// # Errors
    /// A folio has all the holds that it can have, or the spill file cannot be read. Nothing was read then.
    pub(crate) fn read(
        &self,
        mapping: &Arc<Mapping>,
        position: u64,
        target: &mut impl Target,
        stopped: Option<HitStop>,
    ) -> Result<usize, Error> {
        let (mut done, mut is_absent) = (0, stopped == Some(HitStop::Absent));
        let mut spilled = SpilledReads::ComeBack;
        loop {
            let at = position + done as u64;
            let size = mapping.size();
            let want = size.saturating_sub(at).min(target.left() as u64) as usize;
            if want == 0 {
                return Ok(done);
            }
            let wanted = at..at + want as u64;
            let step = if is_absent {
                self.read_missed(MissedBytes { mapping, wanted, spilled: &mut spilled }, target)
            } else if want <= PAGE_SIZE {
                self.read_single(mapping, wanted, target)
            } else {
                self.read_batch(mapping, wanted, target)
            };
            let read = match step {
                Ok(ReadStep::Read(bytes)) => bytes,
                Ok(ReadStep::Absent) => 0,
                Err(_) if done > 0 => return Ok(done), // the next call tells
                Err(error) => return Err(error),
            };
            is_absent = matches!(step, Ok(ReadStep::Absent));
            // The size again, behind the data.
            let left = mapping.size().saturating_sub(at);
            if read as u64 > left {
                return Ok(done + left as usize);
            }
            done += read;
            if met_end_within_page(position, done) {
                return Ok(done);
            }
        }
    }

    /// For a caller that wants no more than a page or so: no batch is set up.
    fn read_single(
        &self,
        mapping: &Arc<Mapping>,
        wanted: Range<u64>,
        target: &mut impl Target,
    ) -> Result<ReadStep, Error> {
        let held = match mapping.try_hold(PageIndex::of_byte(wanted.start)) {
            Ok(held) => held,
            Err(HoldRefused::TooMany) => return Err(Repr::TooManyPins { holds: HOLDS_MAX }.into()),
            Err(_) => return Ok(ReadStep::Absent),
        };
        let read = self.read_held(&held, wanted, target);
        if read == 0 {
            self.wait_filled(mapping, &held);
        }
        Ok(ReadStep::Read(read))
    }

    fn read_batch(
        &self,
        mapping: &Arc<Mapping>,
        wanted: Range<u64>,
        target: &mut impl Target,
    ) -> Result<ReadStep, Error> {
        let mut batch = ReadBatch::new();
        let (first, last) = (PageIndex::of_byte(wanted.start), PageIndex::of_byte(wanted.end - 1));
        let end = mapping.get_folios_contig(first, last, &mut batch);
        let mut done = 0;
        for held in batch.iter() {
            match self.read_held(held, wanted.start + done as u64..wanted.end, target) {
                0 => break,
                bytes => done += bytes,
            }
        }
        match batch.drain().next() {
            _ if done > 0 => {}
            None if end == BatchEnd::TooMany => return Err(Repr::TooManyPins { holds: HOLDS_MAX }.into()),
            None => return Ok(ReadStep::Absent),
            // The others have been given back.
            Some(held) => self.wait_filled(mapping, &held),
        }
        Ok(ReadStep::Read(done))
    }

    /// 0: it is being filled, or has left since it was held.
    fn read_held(&self, held: &HeldFolio<'_>, wanted: Range<u64>, target: &mut impl Target) -> usize {
        let behind = held.first().plus(u64::from(held.order().pages())).first_byte();
        let bytes = (behind.min(wanted.end) - wanted.start) as usize;
        match held.is_readable() {
            ReadableState::Yes => copy_out(held, wanted.start, bytes, target),
            ReadableState::Zeros => target.zero(bytes),
            ReadableState::NotYet | ReadableState::Never => return 0,
        }
        self.touch(held);
        bytes
    }

    fn read_missed(&self, missed: MissedBytes<'_>, target: &mut impl Target) -> Result<ReadStep, Error> {
        let wanted = &missed.wanted;
        let bytes = match entry_at(missed.mapping, wanted) {
            MemoryEntry::Hole { end } => {
                let bytes = (end.first_byte().min(wanted.end) - wanted.start) as usize;
                target.zero(bytes);
                bytes
            }
            MemoryEntry::Folio => 0,
            MemoryEntry::Spilled { .. } => self.read_spilled(missed, target)?,
        };
        Ok(ReadStep::Read(bytes))
    }

    /// 0: look again.
    fn read_spilled(&self, missed: MissedBytes<'_>, target: &mut impl Target) -> Result<usize, Error> {
        let MissedBytes { mapping, wanted, spilled } = missed;
        let (pages, spill_in) = (pages_of(&wanted), SpillIn::of(&self.filemap, mapping));
        if *spilled == SpilledReads::ComeBack {
            match spill_in.without_waiting().bring(pages.clone(), TruncateExclusion::No) {
                Err(error) if error.is_of_memory() => *spilled = SpilledReads::Stay,
                brought => return brought.map(|()| 0),
            }
        }
        let read = spill_in.read_through(pages)?;
        let within = (wanted.start % PAGE_SIZE as u64) as usize;
        let mut rest = read.bytes.get(within..).unwrap_or_default();
        rest = &rest[..rest.len().min((wanted.end - wanted.start) as usize)];
        let count = rest.len();
        while !rest.is_empty() {
            let part = target.next(rest.len());
            let (now, behind) = rest.split_at(part.len());
            part.copy_from_slice(now);
            rest = behind;
        }
        Ok(count)
    }

    /// 0: there is a folio, or is now. Spilled pages are restored.
    pub(super) fn hole_at(&self, mapping: &Arc<Mapping>, wanted: Range<u64>) -> Result<usize, Error> {
        match entry_at(mapping, &wanted) {
            MemoryEntry::Hole { end } => Ok((end.first_byte().min(wanted.end) - wanted.start) as usize),
            MemoryEntry::Folio => Ok(0),
            MemoryEntry::Spilled { .. } => {
                let spill_in = SpillIn::of(&self.filemap, mapping);
                spill_in.bring(pages_of(&wanted), TruncateExclusion::No).map(|()| 0)
            }
        }
    }

    pub(super) fn wait_filled(&self, mapping: &Mapping, held: &HeldFolio<'_>) {
        let is_done = || held.is_readable() != ReadableState::NotYet;
        self.filemap.wait_queue.wait(&*mapping.backend(), &mut || is_done());
    }

    /// A folio was read; for a caller that classifies it.
    pub(super) fn touch(&self, held: &HeldFolio<'_>) {
        crate::filemap::touch(self.filemap.arena.view().grown(), held.frame());
    }
}

fn pages_of(bytes: &Range<u64>) -> Range<PageIndex> {
    PageIndex::of_byte(bytes.start)..PageIndex(pages_of_bytes(bytes.end))
}

fn entry_at(mapping: &Mapping, wanted: &Range<u64>) -> MemoryEntry {
    let Range { start, end } = pages_of(wanted);
    mapping.lock().at(start, end)
}

fn copy_out(held: &HeldFolio<'_>, from: u64, bytes: usize, target: &mut impl Target) {
    let mut done = 0;
    while done < bytes {
        let part = target.next(bytes - done);
        let copied = held.copy_out(from + done as u64, part);
        debug_assert_eq!(copied, part.len(), "a folio that is up to date has all its bytes");
        done += copied;
    }
}

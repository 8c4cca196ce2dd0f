//! Grab: folios of a memory file, found or created, for a caller that wants them all at once.
//!
//! ```text
//!   preallocate    grab --> nothing put in --> left allocated     memory, and no bytes: readers get zeros
//!   pin_folios     grab --> zeros put in ----> pinned             memory with an address, for a device or a library
//!   populate       grab --> bytes put in ----> up to date         populate.rs
//! ```
//!
//! A grab begins under the file's Write lock, shared, so that no thread cuts or punches it meanwhile. With the folios
//! locked, the lock is released: a caller that cuts or punches waits for the folios it meets. So no ranked lock is held
//! while a user's closure puts bytes into folios.
//!
//! Invariants:
//!  1. Pages are grabbed a few at a time ([`GRABBED_PAGES_MAX`]); each few are let go before the next are wanted.
//!  2. Pages behind the end of the file are not grabbed.
//!
//! Not an invariant: that a range is had as a whole at one moment. Nor that a grab of pages that were spilled waits for
//! nothing: they are brought back first.

use std::ops::Range;
use std::sync::Arc;

use crate::arena::HOLDS_MAX;
use crate::backend::DeferredWakes;
use crate::error::{Error, Repr};
use crate::filemap::{SpillIn, TruncateExclusion};
use crate::folio::{LockedState, Pinned, PinnedFolios};
use crate::mapping::{GRAB_PAGES_MAX, Grabbed, Mapping};
use crate::sys::fork::ForkGuard;
use crate::units::{Order, PageIndex, PoolNumber, pages_of_bytes};

use super::Shmem;

pub(super) const GRABBED_PAGES_MAX: u64 = GRAB_PAGES_MAX;

/// Folios of a memory file that are to be pinned.
#[derive(Clone, Debug)]
pub(crate) struct FolioPinRequest {
    /// The bytes that they hold, from the first on, as far as the file goes.
    pub range: Range<u64>,
    pub folios_max: usize,
    /// The pool that is charged for those that are created.
    pub pool: PoolNumber,
    /// The process that pins.
    pub process: ForkGuard,
}

impl Shmem {
    /// Folios for the pages that `range` has in bytes, a few of them from its beginning on; none if the file ends
    /// before. Waits for a caller that has folios of it locked, for memory, and for spilled pages.
    ///
    /// # Errors
    /// There is no memory for the first of them, or it cannot be brought back.
    pub(super) fn grab_some<'a>(
        &'a self,
        mapping: &'a Arc<Mapping>,
        pool: PoolNumber,
        range: Range<u64>,
    ) -> Result<Grabbed<'a>, Error> {
        let pages = PageIndex::of_byte(range.start)..PageIndex(pages_of_bytes(range.end));
        // To the next multiple, so that the largest folios come out.
        let behind = pages.start.align_down(Order::MAX).plus(GRABBED_PAGES_MAX);
        let pages = pages.start..pages.end.min(behind);
        // The Write lock keeps the file from being cut meanwhile. No folio is locked.
        let spill_in = &mut |index: PageIndex, to: PageIndex| {
            SpillIn::of(&self.filemap, mapping).bring(index..to, TruncateExclusion::ByCaller)
        };
        // This may wait for memory, and a waker, foreign code, may want the locks held here.
        let wakes = DeferredWakes::new();
        let nobody_cuts = mapping.write_shared();
        let grabbed = self.filemap.grab(mapping, pool, pages, spill_in);
        drop(nobody_cuts);
        drop(wakes);
        grabbed
    }

    /// Gives memory to all of `range`, in bytes, that has none: it reads as zeros as before. Existing pages stay.
    ///
    /// # Errors
    /// There is no memory for the rest; folios that were given before stay.
    pub(crate) fn preallocate(
        &self,
        mapping: &Arc<Mapping>,
        pool: PoolNumber,
        range: Range<u64>,
    ) -> Result<(), Error> {
        let mut at = range.start;
        while at < range.end {
            let grabbed = self.grab_some(mapping, pool, at..range.end)?;
            let Some(end) = grabbed.end() else { break };
            grabbed.leave_allocated();
            at = end.first_byte();
        }
        Ok(())
    }

    /// Pins the folios that `request` asks for; those that were not there are created, and pages without bytes have
    /// zeros.
    ///
    /// # Errors
    /// There is no memory for all of them, pins would keep more than they may, or a folio has all the holds that it can
    /// have; nothing is pinned then. Those that were created stay.
    pub(crate) fn pin_folios(
        &self,
        mapping: &Arc<Mapping>,
        request: FolioPinRequest,
    ) -> Result<PinnedFolios, Error> {
        let FolioPinRequest { range, folios_max, pool, process } = request;
        let filemap = &self.filemap;
        let mut pinned = PinnedFolios::new(Pinned::new(Arc::clone(&filemap.arena), process), range.start);
        let mut at = range.start;
        while at < range.end && pinned.len() < folios_max {
            let mut grabbed = self.grab_some(mapping, pool, at..range.end)?;
            if grabbed.is_empty() {
                break;
            }
            grabbed.truncate(folios_max - pinned.len());
            for folio in grabbed.folios_mut() {
                if folio.state() == LockedState::Data {
                    folio.touch_all(); // a thread that gets the address may store there
                    continue;
                }
                let zeroed = folio.zero(folio.first().first_byte(), folio.order().bytes());
                zeroed.expect("a folio without bytes refuses none");
            }
            let held = grabbed.commit_into_held();
            let held = held.map_err(|_| Error::from(Repr::TooManyPins { holds: HOLDS_MAX }))?;
            let Some(last) = held.last() else { continue }; // taken out meanwhile
            at = last.first().plus(u64::from(last.order().pages())).first_byte();
            held.into_iter().for_each(|held| pinned.add(held));
            if pinned.count_pages() > filemap.bound().pinned_pages_max() {
                return Err(filemap.bound().too_much_pinned(range.end - range.start));
            }
        }
        Ok(pinned)
    }

    /// Whether all of `range`, in bytes, is the file's.
    ///
    /// # Errors
    /// It is not.
    pub(crate) fn check_inside(mapping: &Mapping, range: &Range<u64>) -> Result<(), Error> {
        let size = mapping.size();
        if range.start <= range.end && range.end <= size {
            return Ok(());
        }
        let Range { start, end } = range;
        let text = format!(
            "cannot use bytes {start} to {end} of the memory file: it is {size} bytes long; \
             make it longer first (set_len), or ask for less"
        );
        Err(Repr::InvalidInput(text).into())
    }
}

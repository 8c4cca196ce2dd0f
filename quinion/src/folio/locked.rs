//! Locked: a folio that is held and locked, as a value: its owner may bring its first bytes.
//!
//! ```text
//!   just inserted  --of_new--.                         .--finish: bytes came      zeros around them; up to date
//!                             >-- Locked --write, zero-<
//!   Held ----------lock------'                          `--unlock                 as it was: what it had, it has
//! ```
//!
//! Three kinds of folios are locked, and are written in two ways:
//!
//! | [`LockedState`] | what readers see meanwhile | a write |
//! |---|---|---|
//! | `New` | nothing: they wait | goes straight into the frames |
//! | `Allocated` | nothing: they wait | the same |
//! | `Data` | the bytes, page by page | goes through [`Writer`](super::Writer), as any other's |
//!
//! Of a folio that is not up to date one range of bytes is known to be written. A write that does not touch that range
//! has the bytes between set to zero, so that the range stays one; the rest around it is set to zero in the end.
//!
//! Invariants:
//!  1. One value is one hold and one lock; both are given back once, on every way out.
//!  2. A folio becomes up to date with every byte of it written or zero.
//!  3. No `&mut [u8]` of a frame exists: readers that came by a stale hint may be looking, and throw it away.
//!
//! Not an invariant: that the folio is in the index. It may be taken out at any time; then it is its holders' until
//! they let it go, and [`FinishOutcome::Left`] says so.
//!
//! It wakes no thread: `mapping/grab.rs` wakes the threads that wait for a folio unlocked here.

use std::ops::Range;

use crate::arena::{Arena, FillEnd, Flags, LockRefused, PutOutcome, WriteRefused};
use crate::units::{Frame, Order, PageIndex};

use super::held::HeldFolio;
use quinion_view::folio::copy;

/// The state of a folio when it was locked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockedState {
    /// The folio was not there: its locker has inserted it.
    New,
    /// The folio was there, and has never had bytes.
    Allocated,
    /// The folio was there, with its bytes.
    Data,
}

/// The outcome of a folio whose bytes have arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FinishOutcome {
    /// The folio is in the index, and up to date if it has bytes.
    Kept,
    /// The folio had left the index, or has since been taken out: its bytes belong to no file.
    Left,
}

/// A folio that is held and locked. Dropping it leaves the folio as it is, unlocks it and gives the hold back.
#[derive(Debug)]
pub struct LockedFolio<'a> {
    held: Option<HeldFolio<'a>>,
    state: LockedState,
    /// The bytes that were written, if the folio is not up to date; else the bytes that were touched.
    written: Range<usize>,
}

impl<'a> LockedFolio<'a> {
    /// Locks a held folio; if that cannot be done, says why and gives the hold back to the caller.
    pub fn lock(held: HeldFolio<'a>) -> Result<Self, (LockRefused, HeldFolio<'a>)> {
        match held.arena().view().own(held.frame()).try_lock(held.stamp()) {
            Ok(word) => {
                let state =
                    if word.has(Flags::UPTODATE) { LockedState::Data } else { LockedState::Allocated };
                Ok(Self { held: Some(held), state, written: 0..0 })
            }
            Err(refused) => Err((refused, held)),
        }
    }

    /// The folio that the caller has inserted, and whose fill has not ended: with its lock and its hold.
    pub fn of_new(arena: &'a Arena, frame: Frame) -> Self {
        Self { held: Some(HeldFolio::of_fill(arena, frame)), state: LockedState::New, written: 0..0 }
    }

    /// The folio, as its holder knows it.
    pub fn held(&self) -> &HeldFolio<'a> {
        self.held.as_ref().expect("it is held until it is given back")
    }
    pub fn state(&self) -> LockedState {
        self.state
    }
    /// The folio's first frame.
    pub fn frame(&self) -> Frame {
        self.held().frame()
    }
    /// The folio's first page.
    pub fn first(&self) -> PageIndex {
        self.held().first()
    }
    /// The folio's order.
    pub fn order(&self) -> Order {
        self.held().order()
    }
    /// The page behind its last.
    pub fn end(&self) -> PageIndex {
        self.first().plus(u64::from(self.order().pages()))
    }
    /// Whether the index may still hold it; it may be taken out right behind this look.
    pub fn is_live(&self) -> bool {
        self.held().arena().view().own(self.frame()).word().is_live()
    }
    /// Whether a byte was put into it since it was locked.
    pub fn is_touched(&self) -> bool {
        !self.written.is_empty()
    }
    /// The pages that were touched; of one that is not up to date yet, all that will be its bytes.
    pub fn touched_pages(&self) -> Range<PageIndex> {
        if self.state != LockedState::Data {
            return self.first()..self.end();
        }
        let page = |byte: usize| self.first().plus(PageIndex::of_byte(byte as u64).0);
        page(self.written.start)..page(self.written.end.max(1) - 1).plus(1)
    }

    /// Puts `bytes` at file position `position`. Refused, and nothing changed from the refused page on, if the folio
    /// has its bytes and is pinned, or has left the index: how many bytes were put before that page comes with it.
    /// May wait as [`Writer::write`](super::FolioWriter::write) does, for folios that have their bytes.
    ///
    /// # Panics
    /// If the folio does not cover all of the range.
    pub fn write(&mut self, position: u64, bytes: &[u8]) -> Result<(), (usize, WriteRefused)> {
        let at = self.range(position, bytes.len());
        if self.state == LockedState::Data {
            let writer = self.held().writer().map_err(|refused| (0, refused))?;
            let wrote = writer.write(position, bytes);
            self.touch(at.start..at.start + wrote.bytes);
            return wrote.refused.map_or(Ok(()), |refused| Err((wrote.bytes, refused)));
        }
        self.reach(&at);
        let to = self.address(&at);
        // SAFETY: this thread has locked the folio, which has no bytes yet, so its frames are this thread's alone; the
        // range lies in them. The source is a slice: if it is of an arena, it is pinned, and this folio is not.
        unsafe { copy::copy_in(bytes.as_ptr(), to, bytes.len()) };
        self.touch(at);
        Ok(())
    }

    /// As [`LockedFolio::write`], zeros.
    pub fn zero(&mut self, position: u64, len: usize) -> Result<(), (usize, WriteRefused)> {
        let at = self.range(position, len);
        if self.state == LockedState::Data {
            let writer = self.held().writer().map_err(|refused| (0, refused))?;
            let wrote = writer.zero(position, len);
            self.touch(at.start..at.start + wrote.bytes);
            return wrote.refused.map_or(Ok(()), |refused| Err((wrote.bytes, refused)));
        }
        self.reach(&at);
        self.zero_raw(&at);
        self.touch(at);
        Ok(())
    }

    /// Counts all of the folio as touched: others will store to it, by its address, when it is unlocked and still held.
    ///
    /// # Panics
    /// If it has no bytes yet.
    pub fn touch_all(&mut self) {
        assert_eq!(self.state, LockedState::Data, "what has no bytes is written first");
        self.touch(0..self.order().bytes());
    }

    /// Sets to zero the bytes between the written range and `at`, so that the two become one range.
    fn reach(&self, at: &Range<usize>) {
        if self.written.is_empty() || at.is_empty() {
            return;
        }
        let Range { start, end } = self.written.clone();
        self.zero_raw(&(end..at.start.max(end)));
        self.zero_raw(&(at.end.min(start)..start));
    }

    fn touch(&mut self, at: Range<usize>) {
        if at.is_empty() {
            return;
        }
        self.written = if self.written.is_empty() {
            at
        } else {
            self.written.start.min(at.start)..self.written.end.max(at.end)
        };
    }

    fn zero_raw(&self, at: &Range<usize>) {
        if !at.is_empty() {
            // SAFETY: as in `write`.
            unsafe { copy::zero(self.address(at), at.len()) };
        }
    }

    fn range(&self, position: u64, len: usize) -> Range<usize> {
        let start = position.checked_sub(self.first().first_byte()).expect("the folio covers the position");
        let bytes = self.order().bytes();
        let fits = start <= bytes as u64 && len <= bytes - start as usize;
        assert!(fits, "{len} bytes at {position} lie in the folio");
        start as usize..start as usize + len
    }

    fn address(&self, at: &Range<usize>) -> *mut u8 {
        let view = self.held().arena().view();
        view.bytes(self.frame()).expect("a held folio has frames").wrapping_add(at.start)
    }

    /// Ends the work on it: if bytes were put into one that had none, it is filled up with zeros and is up to date. It
    /// is unlocked in any case, and the hold given back. The caller wakes those that may wait for it.
    pub fn finish(mut self) -> FinishOutcome {
        if self.state == LockedState::Data || !self.is_touched() {
            return if self.is_live() { FinishOutcome::Kept } else { FinishOutcome::Left };
        }
        let len = self.order().bytes();
        self.zero_raw(&(0..self.written.start));
        self.zero_raw(&(self.written.end..len));
        self.complete()
    }

    /// Gives lock and hold back in one step; of a folio that was not up to date, and is now.
    fn complete(&mut self) -> FinishOutcome {
        let held = self.held.take().expect("it is held until it is given back");
        let (arena, frame) = held.into_parts();
        match arena.view().own(frame).complete() {
            FillEnd::Attached => FinishOutcome::Kept,
            FillEnd::Detached(PutOutcome::Kept) => FinishOutcome::Left,
            FillEnd::Detached(PutOutcome::Last(order)) => {
                arena.free(frame, order);
                FinishOutcome::Left
            }
        }
    }
}

impl Drop for LockedFolio<'_> {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            held.arena().view().own(held.frame()).unlock();
        }
    }
}

//! Places: frames for pages that each have their own.
//!
//! ```text
//!   gaps      [---)      [---------)       what is not cached
//!   claim     [---)      [----) x          each page's frame, as far as nobody has it
//!                               `- somebody has it: it is about to put it into the tree, or it has left and is held
//! ```
//!
//! The mapping of a guest (`arena/guest.rs`) takes no frame that the buddy has, and none of its pages is charged: its
//! extents count in full from the beginning. So there is nothing to reclaim for. What a page may have to wait for is
//! its place: two may want one absent page, and one of them has claimed it and not inserted it yet. The other looks
//! again as soon as the page is there, or its place free.
//!
//! Frames are given back as any others are ([`Filemap::free_runs`], the last hold of a folio): the arena knows whose
//! they are.
//!
//! The pages of an image are **brought** in two steps, so that many can be on their way while the first are waited for:
//! fills of what is missing are started, then each folio is waited for as a whole. Where one did not come, its pages
//! are read one by one, and each that cannot be read has an error of its own.
//!
//! Invariants:
//!  1. A page's folio stands in its place and in no other (asserted by `Mapping::check`).
//!  2. The wait for a place is bounded: a folio that has left and is held for long ends it with "no memory".
#![deny(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use crate::arena::ReadableState;
use crate::backend::DeferredWakes;
use crate::error::{Error, ErrorKind};
use crate::mapping::Mapping;
use crate::readahead::{Config, Readahead, Window};
use crate::sync::{Rank, RankedMutex};
use crate::units::{Order, PAGE_SIZE, PageIndex, PoolNumber};

use super::fill::{AfterSubmit, FillOutcome, FillRequest, SubmitBatch};
use super::frame_supply::FillUrgency;
use super::shared::Filemap;
use super::uncached::Reader;
use super::wait_policy::WaitPolicy;

/// How often a page is brought that was there, and had gone when its folio had ended.
const TRIES: u32 = 1000;

/// What came of pages that were brought.
#[derive(Debug, Default)]
pub(crate) struct FetchedPages {
    /// Pages that are there as a whole, in rising order; they may reach further than was asked.
    pub there: Vec<Range<PageIndex>>,
    /// Pages that cannot be had, and why, in rising order.
    pub failed: Vec<(Range<PageIndex>, Error)>,
    /// The file ends there; of what follows nothing is said.
    pub ended: Option<PageIndex>,
}

impl Filemap {
    /// Starts filling what of `pages` is missing, and waits for none of it; with [`FillUrgency::Asked`] for memory and
    /// places.
    ///
    /// # Errors
    /// There is no memory for the first page that is missing.
    pub(crate) fn start_bringing(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        pages: Range<PageIndex>,
        need: FillUrgency,
    ) -> Result<(), Error> {
        let count = (pages.end.0 - pages.start.0) as u32;
        let window = Window { order: Order::fitting(count), ..Window::exact(pages.start, count) };
        let mut together = SubmitBatch::of(mapping, PoolNumber::DEFAULT, None);
        let (wanted, wait_policy) = (pages.clone(), WaitPolicy::Wait);
        let request = FillRequest { window, wanted, urgency: need, wait_policy };
        let filled = self.insert_window(&mut together, &request);
        together.submit(AfterSubmit::Anything);
        match filled {
            FillOutcome::Submitted(_) | FillOutcome::Nothing => Ok(()),
            _ => Err(self.no_memory(pages.start.first_byte())),
        }
    }

    /// Waits until all of `pages` are there as whole folios, bringing what is not on its way.
    pub(crate) fn bring(self: &Arc<Self>, mapping: &Arc<Mapping>, pages: Range<PageIndex>) -> FetchedPages {
        // What waits inside reaps, and a waker, a stranger's, may want what the caller holds.
        let _wakes = DeferredWakes::new();
        let none = RankedMutex::new(Rank::Readahead, Readahead::new(Config::new(1)));
        let reader = Reader::new(&none, PoolNumber::DEFAULT, None).sure_of_size();
        let (mut brought, mut at, mut tries) = (FetchedPages::default(), pages.start, 0);
        while at < pages.end {
            let held = match self.hold_page(mapping, reader, at.first_byte()) {
                Ok(Some(held)) => held,
                Ok(None) => {
                    brought.ended = Some(at);
                    break;
                }
                Err(error) => {
                    let next =
                        at.plus(u64::from(self.folio_orders.min.pages())).align_down(self.folio_orders.min);
                    // Where there is no memory for this one there is none for the next.
                    let end = if error.kind() == ErrorKind::Io { next.min(pages.end) } else { pages.end };
                    brought.failed.push((at..end, error));
                    (at, tries) = (end, 0);
                    continue;
                }
            };
            self.wait_queue.wait(&*mapping.backend(), &mut || held.is_readable() != ReadableState::NotYet);
            match held.is_readable() {
                ReadableState::Yes => {
                    let end = held.first().plus(u64::from(held.order().pages()));
                    brought.there.push(at..end);
                    (at, tries) = (end, 0);
                }
                // The page had arrived, and another of its folio did not come.
                _ if tries < TRIES => tries += 1,
                _ => {
                    brought.failed.push((at..pages.end, self.no_memory(at.first_byte())));
                    at = pages.end;
                }
            }
        }
        brought
    }

    /// Copies pages that are there, of a mapping whose pages stay, from byte `position` on.
    pub(crate) fn read_brought(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        position: u64,
        to: &mut [u8],
    ) -> Result<usize, Error> {
        let none = RankedMutex::new(Rank::Readahead, Readahead::new(Config::new(PAGE_SIZE as u32)));
        let reader = Reader::new(&none, PoolNumber::DEFAULT, None).sure_of_size();
        self.read(mapping, reader, WaitPolicy::Wait, position, to)
    }
}

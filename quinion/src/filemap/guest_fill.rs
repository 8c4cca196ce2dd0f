//! Guest fill: the pages of an image, brought in two steps.
//!
//! ```text
//!   start     fills of what is missing, many at a time            start_bringing
//!   bring     each folio waited for as a whole                    bring
//! ```
//!
//! Many pages can be on their way while the first are waited for. Where a folio did not come, its pages are read one
//! by one, and each has an error of its own. Each page has its own frame (`guest_places.rs`).
//!
//! Invariant: a page that is returned as there was there as a part of a whole folio.
#![deny(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use crate::arena::ReadableState;
use crate::backend::DeferredWakes;
use crate::error::{Error, ErrorKind};
use crate::mapping::Mapping;
use crate::readahead::{Config, Readahead, Window};
use crate::sync::{Rank, RankedMutex};
use crate::units::{Order, PageIndex, PoolNumber};

use super::fill::{AfterSubmit, FillOutcome, FillRequest, SubmitBatch};
use super::frame_supply::FillUrgency;
use super::shared::Filemap;
use super::uncached::Reader;
use super::wait_policy::WaitPolicy;

/// Bound of the attempts: a page may have arrived, and be gone when its folio has ended.
const TRIES: u32 = 1000;

#[derive(Debug, Default)]
pub(crate) struct FetchedPages {
    /// Whole, in rising order; they may reach further than was asked.
    pub there: Vec<Range<PageIndex>>,
    /// Pages that cannot be had, in rising order.
    pub failed: Vec<(Range<PageIndex>, Error)>,
    /// The first page behind the end of the file, if the end was met.
    pub ended: Option<PageIndex>,
}

impl Filemap {
    /// Fills missing pages, and waits for none of them; with [`FillUrgency::Asked`] for memory and places.
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
        let mut submit_batch = SubmitBatch::of(self, mapping, PoolNumber::DEFAULT, None);
        let (wanted, wait_policy) = (pages.clone(), WaitPolicy::Wait);
        let request = FillRequest { window, wanted, urgency: need, wait_policy };
        let filled = submit_batch.insert_window(&request);
        submit_batch.submit(AfterSubmit::Anything);
        match filled {
            FillOutcome::Submitted(_) | FillOutcome::Nothing => Ok(()),
            _ => Err(self.no_memory(pages.start.first_byte())),
        }
    }

    pub(crate) fn bring(self: &Arc<Self>, mapping: &Arc<Mapping>, pages: Range<PageIndex>) -> FetchedPages {
        // A wait reaps, and a waker runs its owner's code, which may take locks that the caller holds.
        let _wakes = DeferredWakes::new();
        let none = RankedMutex::new(Rank::Readahead, Readahead::new(Config::new(1)));
        let reader = Reader::new(&none, PoolNumber::DEFAULT, None).without_size_check();
        let (mut brought, mut at, mut tries) = (FetchedPages::default(), pages.start, 0);
        while at < pages.end {
            let held = match self.hold_page(mapping, reader, at.first_byte()) {
                Ok(Some(held)) => held,
                Ok(None) => {
                    brought.ended = Some(at);
                    break;
                }
                Err(error) => {
                    let next = at
                        .plus(u64::from(self.supply.folio_orders.min.pages()))
                        .align_down(self.supply.folio_orders.min);
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
}

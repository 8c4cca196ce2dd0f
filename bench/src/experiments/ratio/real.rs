//! Real: a trace replayed on a cache through its public API.
//!
//! One file without storage, each of whose pages holds its number, which each read checks. No readahead, and folios of
//! one page, as in the simulation.
//!
//! The bound of a cache is on all its memory, with tables, nodes and shadows. So it is built a little larger than the
//! data it should hold, and reports at the end how many pages it holds; the simulation beside it gets as many.
//!
//! Not an invariant: that it holds so many all the time. Nodes of the index take extents of data as they become more.

use std::sync::Arc;

use quinion::internals::hooks::with_policy;
use quinion::internals::policy::NewPolicy;
use quinion::internals::units::PAGE_SIZE;
use quinion::{Cache, Hint};

use super::trace::Trace;
use crate::fixtures::pages::{Pages, word_of};
use crate::harness::Unmeasured;

/// Memory that a cache needs beside its data: so many hundredths of it, and so many bytes.
const OVERHEAD_HUNDREDTHS: u64 = 4;
const OVERHEAD_BYTES: u64 = 4 << 20;

pub struct Answered {
    pub hits: u64,
    pub pages_held: usize,
}

/// Reads all of `trace` through a cache of about `pages` pages, which evicts by `policy`.
pub fn answered(trace: &Trace, pages: usize, policy: NewPolicy) -> Result<Answered, Unmeasured> {
    let data = (pages * PAGE_SIZE) as u64;
    let memory = (data + data * OVERHEAD_HUNDREDTHS / 100 + OVERHEAD_BYTES).max(Cache::MEMORY_MIN);
    let builder = with_policy(Cache::builder(), policy).memory(memory);
    let cache = builder.readahead(0).folio_order_max(0).build()?;
    let pages = trace.places.last().map_or(0, |last| last + 1);
    let file = cache.open_backend(Arc::new(Pages(pages)))?;
    file.advise(Hint::Random)?;
    let mut page = [0; PAGE_SIZE];
    for number in &trace.references {
        let place = trace.places[*number as usize];
        file.read_at(&mut page, place * PAGE_SIZE as u64)?;
        if page[..8] != word_of(place) {
            return Err(Unmeasured::Failed(format!(
                "page {place} has another one's bytes; please report this"
            )));
        }
    }
    let stats = cache.stats();
    let held = (stats.data_bytes - stats.free_bytes) / PAGE_SIZE as u64;
    Ok(Answered { hits: stats.hits, pages_held: held as usize })
}

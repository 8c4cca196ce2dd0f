//! Ready: a mapping whose folios are filled, and the ways to read a few of them.
//!
//! ```text
//!   batch              the folios from one index to another, held: stops right after the last
//!   batch and a step   the same, and then a look at the index behind, as a reader does
//!                      that finds out only there that it has enough
//!   batch and copy     the batch of one folio, and its bytes
//!   lookup and copy    the folio at an index, held by a plain lookup, and its bytes
//! ```
//!
//! Its pages are filled by declaring them so: the bytes are nobody's, and only
//! what leads to them is measured.

use std::sync::Arc;

use quinion::arena::{Arena, ArenaOptions};
use quinion::backend::{Backend, MemoryFile};
use quinion::mapping::{Mapping, find};
use quinion::sys::fork::ForkGuard;
use quinion::units::{MappingId, Order, PageIndex};

use super::harness::Unmeasured;

/// The most pages that are inserted in one call.
const RUN_PAGES: u32 = 32;

/// A mapping of pages that are all there.
pub struct Ready {
    arena: Arc<Arena>,
    mapping: Mapping,
    buffer: Vec<u8>,
}

impl Ready {
    /// One of `pages` folios of a page, a multiple of 32.
    pub fn new(pages: u32) -> Result<Self, Unmeasured> {
        let failed = |what: &str| Unmeasured::Failed(format!("the arena has no room for {what}"));
        let arena = Arena::build(ArenaOptions { memory: 32 << 20 });
        let arena = Arc::new(arena.map_err(|error| Unmeasured::Failed(error.to_string()))?);
        let backend: Arc<dyn Backend> = Arc::new(MemoryFile::new(vec![0; pages as usize * 4096]));
        let attributes = backend.attributes()?;
        let made = Mapping::new(Arc::clone(&arena), MappingId(1), backend, &attributes, ForkGuard::new());
        let mapping = made.ok_or_else(|| failed("a mapping"))?;
        for first in (0..pages).step_by(RUN_PAGES as usize) {
            let run = arena.alloc_run(RUN_PAGES).filter(|run| run.pages == RUN_PAGES);
            let run = run.ok_or_else(|| failed("its pages"))?;
            let added = mapping.lock().add_folio_range(PageIndex(first.into()), run, Order(0), None);
            assert_eq!(added.pages, RUN_PAGES);
            for page in 0..RUN_PAGES {
                arena.view().own(run.frame.plus(page)).complete(true);
            }
        }
        Ok(Self { arena, mapping, buffer: vec![0; 4096] })
    }

    /// The ready folios of `folios` pages from `index` on.
    pub fn batch(&mut self, index: u64, folios: u64) {
        let last = PageIndex(index + folios - 1);
        let batch = self.mapping.get_read_batch(PageIndex(index), last, 31);
        assert_eq!(batch.len() as u64, folios);
    }

    /// The same, and a look at what comes behind.
    pub fn batch_and_a_step(&mut self, index: u64, folios: u64) {
        self.batch(index, folios);
        let record = self.arena.view().record(self.mapping.cell()).expect("the mapping has its record");
        let entry = find(&self.arena.view().grown(), record, PageIndex(index + folios));
        std::hint::black_box(entry);
    }

    /// The folio at `index` by a batch of one, and its bytes.
    pub fn batch_and_copy(&mut self, index: u64, _folios: u64) {
        let at = PageIndex(index);
        for held in self.mapping.get_read_batch(at, at, 31) {
            assert_eq!(held.copy_out(index * 4096, &mut self.buffer), 4096);
        }
    }

    /// The folio at `index` by a plain lookup, and its bytes.
    pub fn lookup_and_copy(&mut self, index: u64, _folios: u64) {
        let held = self.mapping.try_hold(PageIndex(index)).expect("it is there");
        assert_eq!(held.copy_out(index * 4096, &mut self.buffer), 4096);
    }
}

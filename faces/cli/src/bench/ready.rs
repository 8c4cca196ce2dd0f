//! Ready: a mapping whose folios are filled, and the ways to read a few of them.
//!
//! ```text
//!   batch              the folios from one index to another, held: stops right after the last
//!   batch and a step   the same, and then a look at the index behind, as a reader does
//!                      that finds out only there that it has enough
//!   batch and copy     the batch of one folio, and its bytes
//!   lookup and copy    the folio at an index, held by a plain lookup, and its bytes
//! ```

use quinion::mapping::{Shape, find};
use quinion::sync::Locks;
use quinion::units::{Order, Orders, PageIndex};
use quinion::xarray::Stop;

use super::harness::Unmeasured;
use super::stage::Stage;

/// A mapping of pages that are all there.
pub struct Ready {
    stage: Stage,
    buffer: Vec<u8>,
}

impl Ready {
    /// One of `pages` folios of a page, a power of two up to 512.
    pub fn new(pages: u32) -> Result<Self, Unmeasured> {
        let stage = Stage::new(32 << 20)?;
        let run = stage.take(0, pages);
        let shape = Shape::of(Orders::PAGES);
        let added = stage.mapping.add_folio_range(run, shape, Locks::Wait, &mut |_, _| {});
        assert!(added.is_some_and(|added| added.stop == Stop::All), "{added:?}");
        stage.complete(run, Order(0));
        Ok(Self { stage, buffer: vec![0; 4096] })
    }

    /// The ready folios of `folios` pages from `index` on.
    pub fn batch(&mut self, index: u64, folios: u64) {
        let last = PageIndex(index + folios - 1);
        let batch = self.stage.mapping.get_read_batch(PageIndex(index), last, 31);
        assert_eq!(batch.len() as u64, folios);
    }

    /// The same, and a look at what comes behind.
    pub fn batch_and_a_step(&mut self, index: u64, folios: u64) {
        self.batch(index, folios);
        let view = self.stage.arena.view();
        let record = view.record(self.stage.mapping.cell()).expect("the mapping has its record");
        std::hint::black_box(find(&view.grown(), record, PageIndex(index + folios)));
    }

    /// The folio at `index` by a batch, and its bytes.
    pub fn batch_and_copy(&mut self, index: u64, _folios: u64) {
        let at = PageIndex(index);
        for held in self.stage.mapping.get_read_batch(at, at, 31) {
            assert_eq!(held.copy_out(index * 4096, &mut self.buffer), 4096);
        }
    }

    /// The folio at `index` by a plain lookup, and its bytes.
    pub fn lookup_and_copy(&mut self, index: u64, _folios: u64) {
        let held = self.stage.mapping.try_hold(PageIndex(index)).expect("it is there");
        assert_eq!(held.copy_out(index * 4096, &mut self.buffer), 4096);
    }
}

//! Ready: a mapping whose folios are filled, and the ways to read a few of them.
//!
//! ```text
//!   batch              the folios from one index to another, held: stops right after the last
//!   batch and a step   the same, and then a look into the slot behind, as a reader does
//!                      that finds out only there that it has enough
//!   batch and copy     the batch of one folio, and its bytes
//!   lookup and copy    the folio at an index, held by a plain lookup, and its bytes
//! ```

use quinion::mapping::{BatchEnd, BatchRules, FolioShape, LastFolioRule, ReadBatch};
use quinion::sync::LockWait;
use quinion::units::{Order, Orders, PageIndex};
use quinion::xarray::RangeStop;

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
        let shape = FolioShape::of(Orders::PAGES);
        let added = stage.mapping.add_folio_range(run, shape, LockWait::Wait, &mut |_, _| {});
        assert!(added.is_some_and(|added| added.stop == RangeStop::All), "{added:?}");
        stage.complete(run, Order(0));
        Ok(Self { stage, buffer: vec![0; 4096] })
    }

    /// Gathers the folios of `folios` pages from `index` on, by `rules`.
    #[inline]
    fn gather(&self, index: u64, folios: u64, rules: BatchRules) {
        let (slab, last) = (self.stage.arena.view().grown(), PageIndex(index + folios - 1));
        let mut batch = ReadBatch::new();
        let end = self.stage.mapping.gather(&slab, PageIndex(index), last, &mut batch, rules);
        assert!(
            end == BatchEnd::Covered && batch.len() as u64 == folios,
            "{end:?} after {} folios",
            batch.len()
        );
    }

    /// The ready folios of `folios` pages from `index` on.
    pub fn batch(&mut self, index: u64, folios: u64) {
        self.gather(index, folios, BatchRules::READ);
    }

    /// The same, and the slot behind, which is read for nothing.
    pub fn batch_and_a_step(&mut self, index: u64, folios: u64) {
        const PAST: BatchRules = BatchRules { at_end: LastFolioRule::LookPast, ..BatchRules::READ };
        self.gather(index, folios, PAST);
    }

    /// The folio at `index` by a batch, and its bytes.
    pub fn batch_and_copy(&mut self, index: u64, _folios: u64) {
        let (at, mut batch) = (PageIndex(index), ReadBatch::new());
        let end = self.stage.mapping.get_read_batch(at, at, &mut batch);
        assert_eq!(end, BatchEnd::Covered);
        for held in batch.iter() {
            assert_eq!(held.copy_out(index * 4096, &mut self.buffer), 4096);
        }
    }

    /// The folio at `index` by a plain lookup, and its bytes.
    pub fn lookup_and_copy(&mut self, index: u64, _folios: u64) {
        let held = self.stage.mapping.try_hold(PageIndex(index)).expect("it is there");
        assert_eq!(held.copy_out(index * 4096, &mut self.buffer), 4096);
    }
}

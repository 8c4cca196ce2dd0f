//! Stage: a mapping by itself, with an arena and without a cache around it.
//!
//! Folios are put in with real frames and real descriptors. Nothing fills them:
//! the thread that inserted them says that they are filled, and only what leads to
//! the bytes is measured.

use std::sync::Arc;

use quinion::Tuning;
use quinion::arena::{Arena, ArenaOptions};
use quinion::backend::{Backend, FillRun, MemoryFile};
use quinion::mapping::{Mapping, Replacement};
use quinion::sync::LockWait;
use quinion::sys::fork::ForkGuard;
use quinion::units::{MappingId, Order, PageIndex};

use super::harness::Unmeasured;

/// Pages of the runs that frames are taken in, at most.
pub const RUN_PAGES_MAX: u32 = 512;

/// A mapping and the arena of its folios.
pub struct Stage {
    /// Where the folios lie.
    pub arena: Arc<Arena>,
    /// Which of them is where.
    pub mapping: Mapping,
}

impl Stage {
    /// A mapping of no folios, in an arena of `memory` bytes.
    pub fn new(memory: u64) -> Result<Self, Unmeasured> {
        let arena = Arena::build(ArenaOptions { memory });
        let arena = Arc::new(arena.map_err(|error| Unmeasured::Failed(error.to_string()))?);
        let backend: Arc<dyn Backend> = Arc::new(MemoryFile::new(Vec::new()));
        let (attributes, process) = (backend.attributes()?, ForkGuard::new());
        let (id, tuning) = (MappingId(1), Tuning::default());
        let mapping = Mapping::new(Arc::clone(&arena), id, backend, &attributes, process, tuning);
        let mapping =
            mapping.ok_or_else(|| Unmeasured::Failed("the arena has no room for a mapping".to_owned()))?;
        Ok(Self { arena, mapping })
    }

    /// Frames for `pages` pages from `index` on, in one run: a power of two, at most [`RUN_PAGES_MAX`].
    pub fn take(&self, index: u64, pages: u32) -> FillRun {
        let run = self.arena.alloc_run(pages, LockWait::Wait).expect("the arena was made large enough");
        assert_eq!(run.pages, pages, "the arena was made large enough for whole runs");
        FillRun { index: PageIndex(index), frame: run.frame, pages }
    }

    /// The folios of `order` that `run` was inserted as are filled now.
    pub fn complete(&self, run: FillRun, order: Order) {
        for page in (0..run.pages).step_by(order.pages() as usize) {
            self.arena.view().own(run.frame.plus(page)).complete(true);
        }
    }

    /// Takes the filled folios of `run` out again, and gives their frames back.
    pub fn evict(&self, run: FillRun, order: Order) {
        let mut guard = self.mapping.lock();
        let evict = |page: u32| {
            let (index, frame) = (run.index.plus(u64::from(page)), run.frame.plus(page));
            (
                frame,
                guard
                    .evict(index, frame, |_| Replacement::Nothing)
                    .expect("it is filled, and nobody holds it"),
            )
        };
        let frames: Vec<_> = (0..run.pages).step_by(order.pages() as usize).map(evict).collect();
        drop(guard);
        self.arena.free_all(&frames);
    }
}

//! A stage for batches: one mapping in a small arena, whose folios a test inserts and removes by itself, and an
//! allocator of nodes that counts slot reads and lets the test act between any two of them.
//!
//! Pages describe themselves (`common`): owner, place and generation.

#![allow(unsafe_code, reason = "a test fills frames by address, as a device does")]

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use quinion::Cache;
use quinion::backend::{Backend, FillRun, MemoryFile};
use quinion::internals::arena::{Arena, ArenaOptions, CellNumber, GrownView};
use quinion::internals::folio::{HeldFolio, copy};
use quinion::internals::mapping::{self, BatchEnd, BatchRules, Mapping, NODE_BITS, NewMapping, ReadBatch};
use quinion::internals::sync::LockWait;
use quinion::internals::sys::fork::ForkGuard;
use quinion::internals::units::{Frame, MappingId, Order, Orders, PAGE_SIZE, PageIndex};
use quinion::internals::xarray::{Entry, Head, NodeSlab, RacySlots, Value, XArray};

use crate::content;

pub const FILE: u32 = 3;

pub struct Stage {
    pub arena: Arc<Arena>,
    pub mapping: Arc<Mapping>,
}

/// The state in which a test inserts a folio.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    Ready,
    /// The folio's fill has not ended; [`Stage::complete`] ends it.
    Filling,
    /// Ready, and the readahead marker on it.
    Marked,
    /// The folio's fill has not ended, and the readahead marker is on it.
    MarkedFilling,
}

/// A folio as a test compares it: its first index and its order.
pub type Shape = (u64, u8);

struct Cells<'a>(&'a Arena);

impl NodeSlab for Cells<'_> {
    fn slots(&self, node: u32) -> &[AtomicU32] {
        self.0.view().slots(CellNumber(node)).unwrap()
    }
    fn head(&self, node: u32) -> &Head {
        &self.0.view().head(CellNumber(node)).unwrap().words
    }
    fn alloc(&self) -> Option<u32> {
        self.0.alloc_cell().map(|cell| cell.0)
    }
    fn free(&self, node: u32) {
        self.0.free_cell(CellNumber(node));
    }
    fn order(&self, folio: u32) -> u8 {
        self.0.view().own(Frame(folio)).word().order().0
    }
}

impl Default for Stage {
    fn default() -> Self {
        Self::new()
    }
}

struct NewFolio {
    first: u64,
    order: u8,
    state: State,
    generation: u32,
}

impl Stage {
    pub fn new() -> Self {
        Self::with(|_, mapping| mapping)
    }

    /// A stage whose mapping is changed by `with` before it is used.
    pub fn with(with: impl FnOnce(&Arc<Arena>, Mapping) -> Mapping) -> Self {
        let arena = Arc::new(Arena::build(ArenaOptions { memory: Cache::MEMORY_MIN }).unwrap());
        let backend: Arc<dyn Backend> = Arc::new(MemoryFile::new(vec![0; 512 * PAGE_SIZE]));
        let known = backend.attributes().unwrap();
        let (id, process) = (MappingId(1), ForkGuard::new());
        let new = NewMapping { arena: &arena, id, backend, attributes: &known, process };
        let mapping = Arc::new(with(&arena, Mapping::new(new).unwrap()));
        Self { arena, mapping }
    }

    /// Inserts a folio of generation 1, and returns its first frame.
    pub fn add(&self, first: u64, order: u8, state: State) -> Frame {
        self.insert(NewFolio { first, order, state, generation: 1 }).expect("there is room for it")
    }

    /// Inserts a folio that is ready, if one is free and nothing is in its way.
    pub fn add_generation(&self, first: u64, order: u8, generation: u32) -> Option<Frame> {
        self.insert(NewFolio { first, order, state: State::Ready, generation })
    }

    fn insert(&self, new: NewFolio) -> Option<Frame> {
        let NewFolio { first, order, state, generation } = new;
        let (index, pages) = (PageIndex(first), 1u32 << order);
        let run = self.arena.alloc_run(pages, LockWait::Wait)?;
        if run.pages < pages {
            self.arena.free_run(run.frame, run.pages);
            return None;
        }
        let marker = matches!(state, State::Marked | State::MarkedFilling).then_some(index);
        let fill = FillRun { index, frame: run.frame, pages };
        let shape = mapping::FolioShape {
            marker,
            ..mapping::FolioShape::of(Orders { min: Order::ZERO, max: Order(order) })
        };
        let added = self.mapping.add_folio_range(fill, shape, LockWait::Wait, &mut |_, _| {})?;
        if added.pages == 0 {
            self.arena.free_run(run.frame, pages);
            return None;
        }
        let mut content = vec![0; pages as usize * PAGE_SIZE];
        content::fill_content(&mut content, FILE, index.first_byte(), generation);
        let to = self.arena.view().bytes(run.frame).unwrap();
        // SAFETY: the folio is locked and its fill is the stage's, so no other thread writes its frames.
        unsafe { copy::copy_in(content.as_ptr(), to, content.len()) };
        if matches!(state, State::Ready | State::Marked) {
            self.complete(run.frame);
        }
        Some(run.frame)
    }

    /// Ends the fill of a folio.
    pub fn complete(&self, frame: Frame) {
        self.arena.view().own(frame).complete();
    }

    /// Removes and frees the folio at `first`, if it is not held.
    pub fn evict(&self, first: u64, frame: Frame) -> bool {
        let order = self.mapping.lock().evict(PageIndex(first), frame, |_| mapping::Replacement::Nothing);
        order.inspect(|&order| self.arena.free(frame, order)).is_some()
    }

    /// Removes every folio; the held ones stay until they are released.
    pub fn let_all_go(&self) {
        self.mapping.lock().remove_all();
    }

    pub fn add_shadow(&self, first: u64, order: u8) {
        let _guard = self.mapping.lock();
        let cells = Cells(&self.arena);
        let record = self.arena.view().record(self.mapping.index().cell()).unwrap();
        let mut tree = XArray::<_, NODE_BITS>::new(&cells, &record.root);
        tree.store(first, order, Entry::value(Value::shadow(order, 9)), |_, _, _| {});
    }

    pub fn holds(&self, frame: Frame) -> u32 {
        self.arena.view().own(frame).word().holds()
    }

    /// A batch of what a reader wants of `from..=to`.
    pub fn batch(&self, from: u64, to: u64) -> (BatchEnd, ReadBatch<'_>) {
        let mut batch = ReadBatch::new();
        let end = self.mapping.get_read_batch(PageIndex(from), PageIndex(to), &mut batch);
        (end, batch)
    }

    /// As [`Stage::batch`], by rules, what of it can be compared, and the slots read for it.
    pub fn gather(&self, from: u64, to: u64, rules: BatchRules) -> (BatchEnd, Vec<Shape>, u32) {
        let watch = Watch::new(self.arena.view().grown());
        let mut batch = ReadBatch::new();
        let end = self.mapping.gather(&watch, PageIndex(from), PageIndex(to), &mut batch, rules);
        (end, shapes(&batch), watch.reads.get())
    }

    #[track_caller]
    pub fn check(&self) {
        self.mapping.check().unwrap();
        self.arena.check().unwrap();
    }
}

pub fn shape(held: &HeldFolio<'_>) -> Shape {
    (held.first().0, held.order().0)
}

pub fn shapes(batch: &ReadBatch<'_>) -> Vec<Shape> {
    batch.iter().map(shape).collect()
}

/// When a [`Watch`] acts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Moment {
    /// Right before this slot read, counted from 1.
    Before(u32),
    /// Right behind it.
    After(u32),
}

/// The arena's nodes; counts slot reads, and acts at one of them.
pub struct Watch<'a> {
    grown: GrownView<'a>,
    pub reads: Cell<u32>,
    moment: Moment,
    act: RefCell<Box<dyn FnMut() + 'a>>,
}

impl<'a> Watch<'a> {
    pub fn new(grown: GrownView<'a>) -> Self {
        Self::acting(grown, Moment::Before(0), || {})
    }
    pub fn acting(grown: GrownView<'a>, moment: Moment, act: impl FnMut() + 'a) -> Self {
        Self { grown, reads: Cell::new(0), moment, act: RefCell::new(Box::new(act)) }
    }
    fn pass(&self, moment: Moment) {
        if moment == self.moment {
            (self.act.borrow_mut())();
        }
    }
}

impl RacySlots for Watch<'_> {
    fn racy_slots(&self, node: u32) -> Option<&[AtomicU32]> {
        self.grown.racy_slots(node)
    }
    fn read_slot(&self, slot: &AtomicU32) -> u32 {
        let read = self.reads.get() + 1;
        self.reads.set(read);
        self.pass(Moment::Before(read));
        let bits = slot.load(Ordering::Acquire); // partner: the Release of the thread that stored the entry
        self.pass(Moment::After(read));
        bits
    }
}

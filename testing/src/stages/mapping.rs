//! A stage: one mapping in a small arena, with nothing above it that would evict or fill.
//!
//! A test can inspect and change its tree under its lock, to put shadows where it wants them. Nodes for that come from
//! the arena itself, and not from the mapping's stock.

#![allow(unsafe_code, reason = "frames are written by address")]

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use quinion::backend::{Backend, FillRun, MemoryFile};
use quinion::internals::arena::{Arena, ArenaOptions, CellNumber, DescriptorWord};
use quinion::internals::folio::copy;
use quinion::internals::mapping::{
    AddedFolio, IndexHooks, InsertPurpose, Mapping, NODE_BITS, NewFolio, NewMapping, NewMemoryMapping, find,
};
use quinion::internals::sync::LockWait;
use quinion::internals::sys::fork::ForkGuard;
use quinion::internals::units::{Frame, MappingId, Order, PAGE_SIZE, PageIndex};
use quinion::internals::xarray::{Entry, Head, Kind, NodeSlab, ShadowOnly, Stored, Value, XArray};

pub struct Stage {
    pub arena: Arc<Arena>,
    pub mapping: Mapping,
}

/// Nodes straight from the arena; those that come to hold shadows only are listed as the mapping's.
pub struct Cells<'a>(&'a Mapping);

impl NodeSlab for Cells<'_> {
    fn slots(&self, node: u32) -> &[AtomicU32] {
        self.0.arena().view().slots(CellNumber(node)).unwrap()
    }
    fn head(&self, node: u32) -> &Head {
        &self.0.arena().view().head(CellNumber(node)).unwrap().words
    }
    fn alloc(&self) -> Option<u32> {
        self.0.arena().alloc_cell().map(|cell| cell.0)
    }
    fn free(&self, node: u32) {
        self.0.arena().free_cell(CellNumber(node));
    }
    fn order(&self, folio: u32) -> u8 {
        self.0.arena().view().own(Frame(folio)).word().order().0
    }
    fn shadow_only(&self, node: u32, change: ShadowOnly) {
        self.0.index().shadow_nodes().note(self.0.id(), node, change);
    }
}

pub fn page(index: u64) -> PageIndex {
    PageIndex(index)
}
pub fn shadow(order: u8, payload: u32) -> Entry {
    Entry::value(Value::shadow(order, payload))
}

impl Default for Stage {
    fn default() -> Self {
        Self::new()
    }
}

impl Stage {
    pub fn new() -> Self {
        Self::of(Arena::MEMORY_MIN)
    }
    /// Lets `hooks` take over some steps of the index, which has no folios yet.
    #[must_use]
    pub fn with_hooks(self, hooks: Option<&'static dyn IndexHooks>) -> Self {
        Self { mapping: self.mapping.with_hooks(hooks), ..self }
    }
    /// With a memory file's mapping of `pages` pages, whose folios stand in no ring.
    pub fn of_memory(pages: u64) -> Self {
        let memory = Arena::MEMORY_MIN;
        let arena = Arc::new(Arena::build(ArenaOptions { memory }).unwrap());
        let mapping = Mapping::memory(NewMemoryMapping {
            arena: &arena,
            id: MappingId(1),
            folio_order_max: Order::MAX,
            spill: None,
            process: ForkGuard::new(),
        });
        let mapping = mapping.unwrap();
        mapping.set_size(pages << 12);
        Self { arena, mapping }
    }
    pub fn of(memory: u64) -> Self {
        let arena = Arc::new(Arena::build(ArenaOptions { memory }).unwrap());
        let file = Arc::new(MemoryFile::new(vec![0; 1 << 20]));
        let known = file.attributes().unwrap();
        let (id, process) = (MappingId(1), ForkGuard::new());
        let new = NewMapping { arena: &arena, id, backend: file, attributes: &known, process };
        let mapping = Mapping::new(new).unwrap();
        Self { arena, mapping }
    }

    /// Calls `act` with the tree, under its lock.
    pub fn tree<R>(&self, act: impl FnOnce(&mut XArray<'_, Cells<'_>, NODE_BITS>) -> R) -> R {
        let _guard = self.mapping.lock();
        let cells = Cells(&self.mapping);
        let record = self.arena.view().record(self.mapping.index().cell()).unwrap();
        act(&mut XArray::new(&cells, &record.root))
    }
    pub fn put_shadow(&self, index: u64, order: u8, payload: u32) {
        let stored = self.tree(|tree| tree.store(index, order, shadow(order, payload), |_, _, _| {}));
        assert_eq!(stored, Stored::Done);
    }
    pub fn load(&self, index: u64) -> Entry {
        self.tree(|tree| tree.load(index))
    }
    pub fn dump(&self) -> String {
        self.tree(|tree| tree.dump())
    }
    /// The entry that a reader without the lock finds.
    pub fn walk(&self, index: u64) -> Entry {
        let record = self.arena.view().record(self.mapping.index().cell()).unwrap();
        find(&self.arena.view().grown(), record, page(index))
    }

    /// A folio's worth of fresh frames, for `index`.
    pub fn folio(&self, index: u64, order: u8) -> NewFolio {
        let frame = self.arena.alloc(Order(order)).expect("frames for a test");
        NewFolio { index: page(index), frame, order: Order(order) }
    }
    /// A run of up to 512 fresh frames, for `index`.
    pub fn run(&self, index: u64, pages: u32) -> FillRun {
        self.try_run(index, pages).expect("frames for a test")
    }
    /// As `run`, if there are frames.
    pub fn try_run(&self, index: u64, pages: u32) -> Option<FillRun> {
        let frame = self.arena.alloc(Order::MAX)?;
        let rest = Order::MAX.pages() - pages;
        if rest > 0 {
            self.arena.free_run(frame.plus(pages), rest);
        }
        Some(FillRun { index: page(index), frame, pages })
    }
    pub fn add(&self, folio: NewFolio) -> AddedFolio {
        self.mapping.add_folio(folio, InsertPurpose::Read, LockWait::Wait)
    }
    /// Ends the fill of a folio whose first frame is `frame`, with its page numbers as its bytes.
    pub fn complete(&self, folio: NewFolio) {
        for nth in 0..folio.order.pages() {
            let number = (folio.index.0 + u64::from(nth)).to_le_bytes();
            let bytes = self.arena.view().bytes(folio.frame.plus(nth)).unwrap();
            for at in (0..PAGE_SIZE).step_by(number.len()) {
                // SAFETY: the frame is the fill's, which is this thread's.
                unsafe { copy::copy_in(number.as_ptr(), bytes.add(at), number.len()) };
            }
        }
        self.arena.view().own(folio.frame).complete();
    }
    pub fn word(&self, frame: Frame) -> DescriptorWord {
        self.arena.view().own(frame).word()
    }
    pub fn pages(&self) -> u64 {
        self.mapping.lock().pages()
    }
    pub fn free_pages(&self) -> u64 {
        self.arena.stats().free_pages
    }
    pub fn free(&self, folio: NewFolio) {
        self.arena.free(folio.frame, folio.order);
    }

    /// Checks that the tree is whole, and that every node that is out is in it or in stock.
    #[track_caller]
    pub fn check(&self) {
        self.mapping.check().unwrap();
        self.arena.check().unwrap();
        let nodes = self.tree(|tree| tree.check().unwrap());
        let spare = self.mapping.index().spare_nodes();
        let used = self.arena.stats().cells_used;
        assert_eq!(used, u64::from(nodes + spare) + 1, "{nodes} nodes, {spare} spare, and the record");
    }

    /// Empties the tree and checks that nothing is left of it.
    #[track_caller]
    pub fn finish(&self) {
        self.check();
        self.mapping.lock().remove_all();
        assert_eq!(self.arena.stats().cells_used, 1, "nodes were lost");
        self.arena.check().unwrap();
    }
}

pub fn is_folio(entry: Entry, frame: Frame) -> bool {
    entry.kind() == Kind::Folio(frame.0)
}

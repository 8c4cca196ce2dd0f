//! Writeback stage: files of a small cache that are written to by whole pages, and a device that is watched.
//!
//! A page of generation `g` holds the number `g << 32 | page`, 512 times. Nothing is read from the device: the stage
//! puts written pages into the cache as the write path does, marks them, and tells write-back.

#![allow(unsafe_code, reason = "frames are written by address")]

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use quinion::backend::{
    Attributes, Backend, Fill, FillRun, Flush, FlushError, MemoryFile, ReapMode, ReapOutcome, SyncKind,
    WaitQueue,
};
use quinion::internals::arena::{Arena, ArenaOptions};
use quinion::internals::filemap::Filemap;
use quinion::internals::folio::copy;
use quinion::internals::mapping::writeback_state::SyncRange;
use quinion::internals::mapping::{
    AddedFolio, FolioLifetime, FolioShape, InsertPurpose, Mapping, MarkOutcome, NewFolio, NewMapping,
};
use quinion::internals::sync::LockWait;
use quinion::internals::sys::fork::ForkGuard;
use quinion::internals::units::{MappingId, Order, Orders, PAGE_SIZE, PageIndex};
use quinion::internals::writeback::{Writeback, WritebackOptions};

pub const ALL: Range<PageIndex> = PageIndex(0)..PageIndex(1 << 40);

pub fn pages(range: Range<u64>) -> Range<PageIndex> {
    PageIndex(range.start)..PageIndex(range.end)
}

/// A cache of 16 MiB that can write back, and nothing above it.
pub struct Stage {
    pub arena: Arc<Arena>,
    pub wait_queue: Arc<WaitQueue>,
    pub filemap: Arc<Filemap>,
    pub writeback: Arc<Writeback>,
}

impl Stage {
    pub fn new(options: WritebackOptions) -> Self {
        Self::with_wait_queue(Arc::new(WaitQueue::new()), options)
    }
    pub fn with_wait_queue(wait_queue: Arc<WaitQueue>, options: WritebackOptions) -> Self {
        let arena = Arc::new(Arena::build(ArenaOptions { memory: 16 << 20 }).unwrap());
        let orders = Orders { min: Order(0), max: Order(0) };
        let filemap = Filemap::new(Arc::clone(&arena), Arc::clone(&wait_queue), orders);
        let filemap = Arc::new(filemap.with_writeback(options));
        let writeback = Arc::clone(filemap.writeback());
        Self { arena, wait_queue, filemap, writeback }
    }

    /// A file of this cache, with its size.
    pub fn open(&self, number: u32, backend: Arc<dyn Backend>) -> Opened<'_> {
        backend.attach(&self.wait_queue);
        let known = backend.attributes().unwrap();
        let mapping = Mapping::new(NewMapping {
            arena: &self.arena,
            id: MappingId(number),
            backend: Arc::clone(&backend),
            attributes: &known,
            process: ForkGuard::new(),
        });
        let mapping = mapping.unwrap().with_dirty_pages(self.writeback.totals());
        mapping.writeback().set_writer(backend);
        Opened { stage: self, mapping: Arc::new(mapping) }
    }
}

/// A file that is written to.
pub struct Opened<'s> {
    pub stage: &'s Stage,
    pub mapping: Arc<Mapping>,
}

pub fn content(page: u64, generation: u32) -> Vec<u8> {
    let number = u64::from(generation) << 32 | page;
    number.to_le_bytes().repeat(PAGE_SIZE / 8)
}

/// The generation of `page` in `file`; `None` if it is not of one. A page that was never written is of generation 0.
pub fn generation_in(file: &[u8], page: u64) -> Option<u32> {
    let at = page as usize * PAGE_SIZE;
    let bytes = file.get(at..at + PAGE_SIZE).unwrap_or(&[0; PAGE_SIZE]);
    if bytes.iter().all(|&byte| byte == 0) {
        return Some(0);
    }
    let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let generation = (number >> 32) as u32;
    (bytes == content(page, generation)).then_some(generation)
}

impl Opened<'_> {
    /// Writes whole pages, of one generation.
    pub fn write(&self, range: Range<u64>, generation: u32) {
        self.write_fated(range, generation, FolioLifetime::Stays);
    }

    /// As [`Self::write`], with this fate of the folios that are new.
    pub fn write_fated(&self, range: Range<u64>, generation: u32, fate: FolioLifetime) {
        for page in range {
            while !self.overwrite(page, generation) && !self.insert(page, generation, fate) {}
        }
        self.stage.writeback.note_dirty(&self.mapping);
    }

    fn overwrite(&self, page: u64, generation: u32) -> bool {
        let Ok(held) = self.mapping.try_hold(PageIndex(page)) else { return false };
        let Ok(writer) = held.writer() else { return false };
        let bytes = content(page, generation);
        if writer.write(page * PAGE_SIZE as u64, &bytes).bytes < bytes.len() {
            return false;
        }
        let meant = pages(page..page + 1);
        let now = self.stage.writeback.now();
        self.mapping.is_dirty(&held, meant.clone())
            || self.mapping.lock().mark_dirty(&held, meant, now) != MarkOutcome::Left
    }

    fn insert(&self, page: u64, generation: u32, fate: FolioLifetime) -> bool {
        let frame = self.stage.arena.alloc(Order(0)).expect("memory for a test");
        let folio = NewFolio { index: PageIndex(page), frame, order: Order(0) };
        let bytes = content(page, generation);
        let to = self.stage.arena.view().bytes(frame).unwrap();
        // SAFETY: no other thread has the frame yet.
        unsafe { copy::copy_in(bytes.as_ptr(), to, PAGE_SIZE) };
        let shape = FolioShape { purpose: InsertPurpose::Write, fate, ..FolioShape::of(Orders::PAGES) };
        let added = self.mapping.add_folio_watched(folio, shape, LockWait::Wait, &mut || {});
        if !matches!(added, AddedFolio::Added { .. }) {
            self.stage.arena.free(frame, Order(0));
            return false;
        }
        let run = FillRun { index: PageIndex(page), frame, pages: 1 };
        let marked = self.mapping.lock().mark_run_dirty(run, self.stage.writeback.now());
        self.stage.arena.view().own(frame).complete();
        marked != MarkOutcome::Left
    }

    /// Cuts or extends what readers are shown.
    pub fn set_size(&self, bytes: u64) {
        let record = self.stage.arena.view().record(self.mapping.index().cell()).unwrap();
        record.size.store(bytes, Ordering::Relaxed);
    }

    pub fn dirty(&self) -> u64 {
        self.mapping.writeback().dirty_pages().dirty()
    }
    pub fn under_way(&self) -> u64 {
        self.mapping.writeback().dirty_pages().writeback()
    }
    pub fn is_cached(&self, page: u64) -> bool {
        self.mapping.try_hold(PageIndex(page)).is_ok()
    }
    pub fn evict_all(&self) -> u64 {
        self.mapping.lock().drop_range(PageIndex(0), ALL.end, ALL.end)
    }
    pub fn sync(&self, handle: &quinion::internals::errseq::ErrorCursor) -> Result<(), i32> {
        self.sync_range(ALL, handle)
    }
    pub fn sync_range(
        &self,
        range: Range<PageIndex>,
        handle: &quinion::internals::errseq::ErrorCursor,
    ) -> Result<(), i32> {
        let range = SyncRange { kind: SyncKind::Data, pages: &range };
        let synced = self.stage.writeback.sync(&self.mapping, range, handle);
        synced.map_err(|failed| failed.error.raw_os_error().unwrap())
    }
    pub fn handle(&self) -> quinion::internals::errseq::ErrorCursor {
        self.mapping.writeback().errors().sample()
    }
}

type Hook = dyn FnMut() + Send;

/// A device that records its requests, and reports each before it carries it out.
#[derive(Default)]
struct RequestRecord {
    /// The first byte and the length of each flush.
    flushes: Vec<(u64, usize)>,
    before_flush: Option<Box<Hook>>,
    before_sync: Option<Box<Hook>>,
    before_attributes: Option<Box<Hook>>,
}

/// See [`RequestRecord`].
pub struct RecordingBackend {
    pub inner: Arc<dyn Backend>,
    record: Mutex<RequestRecord>,
}

impl RecordingBackend {
    pub fn new(inner: Arc<dyn Backend>) -> Arc<Self> {
        Arc::new(Self { inner, record: Mutex::default() })
    }
    pub fn take_flushes(&self) -> Vec<(u64, usize)> {
        std::mem::take(&mut self.record.lock().unwrap().flushes)
    }
    pub fn before_flush(&self, hook: impl FnMut() + Send + 'static) {
        self.record.lock().unwrap().before_flush = Some(Box::new(hook));
    }
    pub fn before_sync(&self, hook: impl FnMut() + Send + 'static) {
        self.record.lock().unwrap().before_sync = Some(Box::new(hook));
    }
    pub fn before_attributes(&self, hook: impl FnMut() + Send + 'static) {
        self.record.lock().unwrap().before_attributes = Some(Box::new(hook));
    }
    fn call(&self, which: fn(&mut RequestRecord) -> &mut Option<Box<Hook>>) {
        let hook = which(&mut self.record.lock().unwrap()).take();
        if let Some(mut hook) = hook {
            hook();
            which(&mut self.record.lock().unwrap()).get_or_insert(hook);
        }
    }
}

impl fmt::Debug for RecordingBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RecordingBackend({:?})", self.inner)
    }
}

impl Backend for RecordingBackend {
    fn name(&self) -> &'static str {
        "watched"
    }
    fn attach(&self, wait_queue: &Arc<WaitQueue>) {
        self.inner.attach(wait_queue);
    }
    fn attributes(&self) -> io::Result<Attributes> {
        self.call(|record| &mut record.before_attributes);
        self.inner.attributes()
    }
    fn attributes_may_wait(&self) -> bool {
        self.inner.attributes_may_wait()
    }
    fn submit(&self, fills: Vec<Fill>) {
        self.inner.submit(fills);
    }
    fn reap(&self, how: ReapMode, done: &mut dyn FnMut() -> bool) -> ReapOutcome {
        self.inner.reap(how, done)
    }
    fn wants_leader(&self) -> bool {
        self.inner.wants_leader()
    }
    fn can_write(&self) -> bool {
        true
    }
    fn flush(&self, flushes: Vec<Flush>) {
        let record = flushes.iter().map(|flush| (flush.position(), flush.len()));
        self.record.lock().unwrap().flushes.extend(record);
        self.call(|record| &mut record.before_flush);
        self.inner.flush(flushes);
    }
    fn sync(&self, kind: SyncKind, range: Range<u64>) -> io::Result<()> {
        self.call(|record| &mut record.before_sync);
        self.inner.sync(kind, range)
    }
    fn set_size(&self, bytes: u64) -> io::Result<()> {
        self.inner.set_size(bytes)
    }
}

/// A device that takes a flush's bytes at submission, as a quick one does, and reports the end when it is reaped, as a
/// slow one does.
pub struct Early {
    pub file: Arc<MemoryFile>,
    wait_queue: Mutex<Option<Arc<WaitQueue>>>,
    taken: Mutex<Vec<Flush>>,
    sync_fails: Mutex<Option<i32>>,
    is_full: AtomicBool,
}

impl Early {
    pub fn new(file: Arc<MemoryFile>) -> Arc<Self> {
        Arc::new(Self {
            file,
            wait_queue: Mutex::default(),
            taken: Mutex::default(),
            sync_fails: Mutex::default(),
            is_full: AtomicBool::new(false),
        })
    }
    /// From now on it refuses all bytes, and reports that at the reap; or takes all.
    pub fn set_full(&self, is_full: bool) {
        self.is_full.store(is_full, Ordering::Relaxed);
    }
    /// The next sync fails with this number.
    pub fn fail_sync(&self, errno: i32) {
        *self.sync_fails.lock().unwrap() = Some(errno);
    }
}

impl fmt::Debug for Early {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Early")
    }
}

impl Backend for Early {
    fn name(&self) -> &'static str {
        "early"
    }
    fn attach(&self, wait_queue: &Arc<WaitQueue>) {
        *self.wait_queue.lock().unwrap() = Some(Arc::clone(wait_queue));
    }
    fn attributes(&self) -> io::Result<Attributes> {
        self.file.attributes()
    }
    fn attributes_may_wait(&self) -> bool {
        false
    }
    fn submit(&self, fills: Vec<Fill>) {
        self.file.submit(fills);
    }
    fn reap(&self, _how: ReapMode, _done: &mut dyn FnMut() -> bool) -> ReapOutcome {
        let ended = std::mem::take(&mut *self.taken.lock().unwrap());
        let count = ended.len();
        for flush in ended {
            let full = || FlushError { written: 0, error: io::Error::from_raw_os_error(libc::ENOSPC) };
            flush.complete(if self.is_full.load(Ordering::Relaxed) { Err(full()) } else { Ok(()) });
        }
        if count > 0 { ReapOutcome::Some(count) } else { ReapOutcome::Elsewhere }
    }
    fn wants_leader(&self) -> bool {
        !self.taken.lock().unwrap().is_empty()
    }
    fn can_write(&self) -> bool {
        true
    }
    fn flush(&self, flushes: Vec<Flush>) {
        for flush in flushes.iter().filter(|_| !self.is_full.load(Ordering::Relaxed)) {
            let mut bytes = vec![0; flush.len()];
            flush.read(0, &mut bytes);
            let at = flush.position() as usize;
            self.file.change(|content| content[at..at + bytes.len()].copy_from_slice(&bytes));
        }
        self.taken.lock().unwrap().extend(flushes);
        let wait_queue = self.wait_queue.lock().unwrap().clone();
        wait_queue.iter().for_each(|wait_queue| wait_queue.wake());
    }
    fn sync(&self, _kind: SyncKind, _range: Range<u64>) -> io::Result<()> {
        self.sync_fails
            .lock()
            .unwrap()
            .take()
            .map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
    }
}

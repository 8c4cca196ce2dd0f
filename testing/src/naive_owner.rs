//! A naive owner: a real arena, the simplest index that viewers can walk, one lock around it all, and
//! buffered reads. It evicts first in, first out, and does so all the time in a small arena.
//!
//! It shares with the cache what viewers see (the arena, the descriptors, the copy) and none of what the cache does: no
//! readahead, no folio larger than a page, no backend. So a test that fails with the cache and passes with this owner
//! has found a fault above the arena.
#![allow(unsafe_code, reason = "frames are filled by address")]

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use quinion::internals::arena::control::Advice;
use quinion::internals::arena::{
    Arena, ArenaOptions, ArenaShare, CellNumber, Flags, RetireOutcome, Validation,
};
use quinion::internals::folio::copy;
use quinion::internals::units::{FileId, Frame, MappingId, Order, PAGE_SIZE, PageIndex};
use quinion::internals::xarray::{Entry, Kind, Root};
use quinion_owner::internals::serve::{Attached, Caching, Owner, WriterAccess};
use quinion_owner::internals::viewer::sys::Errno;

const LEVELS: u8 = 3; // up to 64^3 pages: 1 GiB
const FILL_PAGES_MAX: u64 = 64;

#[derive(Debug)]
struct Mapping {
    file: File,
    cell: CellNumber,
    id: MappingId,
    root: CellNumber,
    size: u64,
}

#[derive(Debug, Default)]
struct State {
    mappings: HashMap<u64, Mapping>,
    /// The cached pages, in the order of insertion: handle, page, frame.
    queue: VecDeque<(u64, u64, Frame)>,
    next: u64,
}

/// See the head of this file.
#[derive(Debug)]
pub struct NaiveOwner {
    arena: Arena,
    state: Mutex<State>,
    /// Pages that may be cached at a time.
    pages_max: usize,
    pub fills: AtomicU64,
    pub touches: AtomicU64,
    pub attached: AtomicU64,
    pub detached: AtomicU64,
    /// Files that a viewer was about to remove.
    pub removed: Mutex<Vec<FileId>>,
    /// Fills to answer with an error before the next one that works.
    pub failing_fills: AtomicU64,
    /// How long a fill takes, in milliseconds.
    pub fill_millis: AtomicU64,
    pub attach_millis: AtomicU64,
    /// Calls on files on this device hang; 0 for none.
    pub hung_device: AtomicU64,
    /// Whether it panics when it attaches, fills or unpins; 0 for not.
    pub panics: AtomicU64,
    /// How long a pin takes, in milliseconds. A pin is a number, and pins nothing.
    pub pin_millis: AtomicU64,
    pub unpins: AtomicU64,
    /// Whether it refuses files that are open for writing.
    pub minds_writers: AtomicBool,
    /// The hints of programs about their reads: advice, position, length.
    pub hints: Mutex<Vec<(Advice, u64, u64)>>,
}

impl NaiveOwner {
    pub fn new(pages_max: usize) -> Arc<Self> {
        let arena = Arena::build(ArenaOptions { memory: 64 << 20 }).expect("an arena of 64 MiB");
        let zero = || AtomicU64::new(0);
        Arc::new(Self {
            arena,
            state: Mutex::default(),
            pages_max,
            fills: zero(),
            touches: zero(),
            attached: zero(),
            detached: zero(),
            removed: Mutex::default(),
            failing_fills: zero(),
            fill_millis: zero(),
            attach_millis: zero(),
            hung_device: zero(),
            panics: zero(),
            pin_millis: zero(),
            unpins: zero(),
            minds_writers: AtomicBool::new(false),
            hints: Mutex::default(),
        })
    }

    /// An owner that refuses files that are open for writing, and drops one that a viewer opens so.
    pub fn minding_writers(pages_max: usize) -> Arc<Self> {
        let owner = Self::new(pages_max);
        owner.minds_writers.store(true, Ordering::Relaxed);
        owner
    }

    fn panic_if_asked(&self) {
        assert!(self.panics.load(Ordering::Relaxed) == 0, "asked to panic");
    }

    fn wait_while_hung(&self, device: u64) {
        while device != 0 && self.hung_device.load(Ordering::Relaxed) == device {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    fn cell(&self) -> CellNumber {
        self.arena.alloc_cell().expect("cells for a test")
    }

    /// The slot of a page, with the nodes above it made if need be.
    fn slot(&self, root: CellNumber, page: u64) -> &std::sync::atomic::AtomicU32 {
        let view = self.arena.view();
        let mut node = root;
        for level in (1..LEVELS).rev() {
            let slot = &view.slots(node).unwrap()[(page >> (6 * level)) as usize & 63];
            node = match Entry::from_bits(slot.load(Ordering::Relaxed)).kind() {
                Kind::Node(number) => CellNumber(number),
                _ => {
                    let new = self.cell();
                    slot.store(Entry::node(new.0).bits(), Ordering::Release); // partner: the walk
                    new
                }
            };
        }
        &view.slots(node).unwrap()[page as usize & 63]
    }

    fn evict(&self, state: &mut State, which: usize) {
        let (handle, page, frame) = state.queue.remove(which).expect("it was found there");
        let root = state.mappings[&handle].root;
        self.slot(root, page).store(0, Ordering::Release); // partner: the walk
        assert_eq!(self.arena.view().own(frame).retire(), RetireOutcome::Free);
        self.arena.free(frame, Order::ZERO);
    }

    fn fill_page(&self, state: &mut State, handle: u64, page: u64) -> Result<(), Errno> {
        let root = state.mappings[&handle].root;
        if self.slot(root, page).load(Ordering::Relaxed) != 0 {
            return Ok(());
        }
        while state.queue.len() >= self.pages_max {
            self.evict(state, 0);
        }
        let frame = self.arena.alloc(Order::ZERO).ok_or(Errno(12))?;
        let mut bytes = [0u8; PAGE_SIZE];
        let mut done = 0;
        while done < PAGE_SIZE {
            let at = page * PAGE_SIZE as u64 + done as u64;
            match state.mappings[&handle].file.read_at(&mut bytes[done..], at) {
                Ok(0) => break,
                Ok(more) => done += more,
                Err(_) => return Err(Errno::IO),
            }
        }
        let view = self.arena.view();
        let descriptor = view.own(frame);
        let marker = if page % 16 == 8 { Flags::MARKER } else { 0 };
        descriptor.prepare_with(state.mappings[&handle].id, PageIndex(page), Order::ZERO, marker);
        // SAFETY: no other thread has the frame until it is complete.
        unsafe { copy::copy_in(bytes.as_ptr(), view.bytes(frame).unwrap(), PAGE_SIZE) };
        descriptor.complete();
        self.slot(root, page).store(Entry::folio(frame.0).bits(), Ordering::Release); // partner: the walk
        state.queue.push_back((handle, page, frame));
        Ok(())
    }
}

impl Owner for NaiveOwner {
    fn arena(&self) -> ArenaShare<'_> {
        self.arena.share()
    }

    fn attach(&self, file: OwnedFd, id: FileId) -> Result<Attached, Errno> {
        self.panic_if_asked();
        std::thread::sleep(std::time::Duration::from_millis(self.attach_millis.load(Ordering::Relaxed)));
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let file = File::open(path).map_err(|error| Errno(error.raw_os_error().unwrap_or(5)))?;
        let data = file.metadata().map_err(|_| Errno::IO)?;
        if (data.dev(), data.ino()) != (id.device, id.inode) || !data.is_file() {
            return Err(Errno::BADF);
        }
        // The kernel gives leases on memory files (memfd) that are being written.
        let has_writers = || data.nlink() == 0 || is_open_for_writing(&file);
        if self.minds_writers.load(Ordering::Relaxed) && has_writers() {
            return Err(Errno::TXTBSY);
        }
        let mut state = self.state.lock().unwrap();
        state.next += 1;
        let handle = state.next;
        let (cell, root, id) = (self.cell(), self.cell(), MappingId(handle as u32));
        let record = self.arena.view().record(cell).unwrap();
        // Release, partner: the Acquire in `find`, through which a viewer comes to the node.
        record.root.store(Root { entry: Entry::node(root.0), levels: LEVELS }.bits(), Ordering::Release);
        record.size.store(data.len(), Ordering::Relaxed);
        record.set_validation(Validation::Immutable);
        record.id.store(id.0, Ordering::Release); // partner: `read_hits`
        state.mappings.insert(handle, Mapping { file, cell, id, root, size: data.len() });
        self.attached.fetch_add(1, Ordering::Release);
        Ok(Attached { handle, cell, id })
    }

    fn close_idle(&self, id: FileId) {
        self.wait_while_hung(id.device);
        self.removed.lock().unwrap().push(id);
    }

    fn revoke(&self, id: FileId) {
        self.wait_while_hung(id.device);
    }

    fn writer_opened(&self, id: FileId, _: WriterAccess) {
        self.wait_while_hung(id.device);
        let state = self.state.lock().unwrap();
        for mapping in state.mappings.values() {
            let data = mapping.file.metadata().unwrap();
            if (data.dev(), data.ino()) == (id.device, id.inode) {
                self.arena.view().record(mapping.cell).unwrap().set_validation(Validation::Kernel);
            }
        }
    }

    fn fill(&self, handle: u64, position: u64, len: u64, _: Caching) -> Result<(), Errno> {
        self.panic_if_asked();
        std::thread::sleep(std::time::Duration::from_millis(self.fill_millis.load(Ordering::Relaxed)));
        let hangs = |owner: &Self| {
            let device = owner.hung_device.load(Ordering::Relaxed);
            let state = owner.state.lock().unwrap();
            let mapping = state.mappings.get(&handle);
            device != 0 && mapping.is_some_and(|found| found.file.metadata().unwrap().dev() == device)
        };
        while hangs(self) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let fails = |left: u64| left.checked_sub(1);
        if self.failing_fills.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fails).is_ok() {
            return Err(Errno::IO);
        }
        self.fills.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state.lock().unwrap();
        let size = state.mappings.get(&handle).ok_or(Errno::BADF)?.size;
        let first = position / PAGE_SIZE as u64;
        let end = position.saturating_add(len).min(size).div_ceil(PAGE_SIZE as u64);
        let pages_max = FILL_PAGES_MAX.min(self.pages_max as u64 / 2).max(1);
        for page in first..end.min(first + pages_max) {
            self.fill_page(&mut state, handle, page)?;
        }
        Ok(())
    }

    fn advise(&self, _: u64, advice: Advice, position: u64, len: u64) -> Result<(), Errno> {
        self.hints.lock().unwrap().push((advice, position, len));
        Ok(())
    }

    fn advance(&self, handle: u64, page: PageIndex, _: Caching) {
        {
            let state = self.state.lock().unwrap();
            let marked = state.queue.iter().find(|&&(h, p, _)| (h, p) == (handle, page.0));
            let Some(&(_, _, frame)) = marked else { return };
            let descriptor = self.arena.view().own(frame);
            if let Ok(ticket) = descriptor.begin_read(state.mappings[&handle].id, page) {
                descriptor.take_marker(ticket);
            }
        }
        let _ = self.fill(handle, (page.0 + 1) * PAGE_SIZE as u64, 8 * PAGE_SIZE as u64, Caching::Cached);
    }

    fn revalidate(&self, handle: u64) -> Result<u64, Errno> {
        let mut state = self.state.lock().unwrap();
        let mapping = state.mappings.get_mut(&handle).ok_or(Errno::BADF)?;
        let size = mapping.file.metadata().map_err(|_| Errno::IO)?.len();
        let kept = mapping.size.min(size) / PAGE_SIZE as u64;
        mapping.size = size;
        let record = self.arena.view().record(mapping.cell).unwrap();
        let shrank = record.size.load(Ordering::Relaxed) > size;
        // Release here and below, partner: the Acquire of the size in `read_hits`.
        if shrank {
            record.size.store(size, Ordering::Release);
        }
        while let Some(which) = state.queue.iter().position(|&(h, page, _)| h == handle && page >= kept) {
            self.evict(&mut state, which);
        }
        record.size.store(size, Ordering::Release); // partner: `read_hits`
        Ok(size)
    }

    fn detach(&self, handle: u64) {
        let mut state = self.state.lock().unwrap();
        while let Some(which) = state.queue.iter().position(|&(h, ..)| h == handle) {
            self.evict(&mut state, which);
        }
        if let Some(mapping) = state.mappings.remove(&handle) {
            // The cells are not reused: a naive owner has enough. Release, partner: `read_hits`.
            self.arena.view().record(mapping.cell).unwrap().id.store(0, Ordering::Release);
        }
        // Last, so that a test that sees it finds the record gone. Release, partner: the loads of `detached` in tests.
        self.detached.fetch_add(1, Ordering::Release);
    }

    fn pin(&self, _: u64, position: u64, len: u64) -> Result<(u64, u64), Errno> {
        std::thread::sleep(std::time::Duration::from_millis(self.pin_millis.load(Ordering::Relaxed)));
        Ok((position + 1, len))
    }

    fn unpin(&self, _: u64, _: u64) {
        self.unpins.fetch_add(1, Ordering::Relaxed);
        self.panic_if_asked();
    }

    fn touched(&self, frame: Frame) {
        self.touches.fetch_add(1, Ordering::Relaxed);
        if let Some(byte) = self.arena.view().referenced(frame) {
            byte.store(1, Ordering::Relaxed);
        }
    }
}

/// The kernel gives no read lease on a file that is open for writing. The one it gives is given up at once.
fn is_open_for_writing(file: &File) -> bool {
    // SAFETY: numbers only.
    let [taken, _] = [libc::F_RDLCK, libc::F_UNLCK]
        .map(|kind| unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) });
    taken != 0
}

//! Transfers: runs of pages in ordinary memory, for tests that hand them to backends.
//!
//! A [`Run`] is the memory of one fill or flush, its sink, and the place where its end is seen. It insists that it ends
//! once. The bytes of a flush's last page behind its end are poison, so that a byte written from there is seen in the
//! file.

#![allow(unsafe_code, reason = "fills and flushes are of memory by address")]

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use quinion::backend::{Backend, Fill, FillRun, FillSink, Flush, FlushError, FlushRun, FlushSink, WaitQueue};
use quinion::internals::units::{Frame, PageIndex};

pub const PAGE: usize = 4096;
/// A byte that no file here holds, and no flush may bring.
pub const POISON: u8 = 0xa5;

/// The memory and the end of a fill or a flush.
pub struct Run {
    buffer: NonNull<u8>,
    pages: usize,
    outcome: Mutex<Option<Result<usize, FlushError>>>,
    is_done: AtomicBool,
    wait_queue: Arc<WaitQueue>,
}

// SAFETY: the buffer is used by the fill or flush, and by the test after its end, which `is_done` publishes.
unsafe impl Send for Run {}
// SAFETY: as above.
unsafe impl Sync for Run {}

impl Run {
    fn new(wait_queue: &Arc<WaitQueue>, pages: usize) -> Arc<Self> {
        let layout = Self::layout(pages);
        // SAFETY: the layout is of at least one page, and the memory that long.
        let buffer = unsafe {
            let buffer = NonNull::new(alloc(layout)).unwrap_or_else(|| handle_alloc_error(layout));
            buffer.as_ptr().write_bytes(POISON, layout.size());
            buffer
        };
        let outcome = Mutex::new(None);
        Arc::new(Self {
            buffer,
            pages,
            outcome,
            is_done: AtomicBool::new(false),
            wait_queue: Arc::clone(wait_queue),
        })
    }

    /// A fill of `pages` pages from `page` on.
    pub fn fill(wait_queue: &Arc<WaitQueue>, page: u64, pages: usize) -> (Fill, Arc<Self>) {
        let run = Self::new(wait_queue, pages);
        let fill_run = FillRun { index: PageIndex(page), frame: Frame(1), pages: pages as u32 };
        // SAFETY: the sink, which the fill holds until it is completed, keeps the memory.
        let fill = unsafe { Fill::new(fill_run, run.buffer, Arc::clone(&run) as Arc<dyn FillSink>) };
        (fill, run)
    }

    /// A flush of `bytes` to the file from `page` on.
    pub fn flush(wait_queue: &Arc<WaitQueue>, page: u64, bytes: &[u8]) -> (Flush, Arc<Self>) {
        Self::flush_from(wait_queue, page, bytes, 0)
    }

    /// As [`Self::flush`], with memory that begins `crooked` bytes after a page's start.
    pub fn flush_from(
        wait_queue: &Arc<WaitQueue>,
        page: u64,
        bytes: &[u8],
        crooked: usize,
    ) -> (Flush, Arc<Self>) {
        let run = Self::new(wait_queue, (crooked + bytes.len()).div_ceil(PAGE));
        let flush_run = FlushRun { index: PageIndex(page), frame: Frame(1), bytes: bytes.len() };
        // SAFETY: inside the memory, which the sink keeps, and which the flush holds until it is completed.
        let flush = unsafe {
            let start = run.buffer.add(crooked);
            start.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            Flush::new(flush_run, start, Arc::clone(&run) as Arc<dyn FlushSink>)
        };
        (flush, run)
    }

    fn layout(pages: usize) -> Layout {
        Layout::from_size_align(pages * PAGE, PAGE).expect("a size of some pages")
    }

    pub fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Acquire) // partner: `end`
    }

    fn end(&self, outcome: Result<usize, FlushError>) {
        assert!(self.outcome.lock().unwrap().replace(outcome).is_none(), "it ends once");
        assert!(!self.is_done.swap(true, Ordering::AcqRel), "and only once"); // partner: `is_done`
        self.wait_queue.wake();
    }

    /// The outcome of a run that has ended.
    pub fn outcome(&self) -> Result<usize, FlushError> {
        assert!(self.is_done());
        self.outcome.lock().unwrap().take().expect("asked for once")
    }

    /// Waits as those above do, reaping, and returns the outcome.
    pub fn wait(&self, backend: &dyn Backend) -> Result<usize, FlushError> {
        self.wait_queue.wait(backend, &mut || self.is_done());
        self.outcome()
    }

    /// Waits, and gives the bytes that a fill brought.
    pub fn bytes(&self, backend: &dyn Backend) -> Vec<u8> {
        let bytes = self.wait(backend).unwrap();
        let mut all = vec![0; self.pages * PAGE];
        // SAFETY: it has ended, so the memory, which is that long, is not used any more.
        unsafe { self.buffer.as_ptr().copy_to_nonoverlapping(all.as_mut_ptr(), all.len()) };
        all.truncate(bytes);
        all
    }
}

impl FillSink for Run {
    fn fill_completed(&self, _: FillRun, result: io::Result<usize>) {
        self.end(result.map_err(|error| FlushError { written: 0, error }));
    }
}

impl FlushSink for Run {
    fn flush_completed(&self, run: FlushRun, outcome: Result<(), FlushError>) {
        self.end(outcome.map(|()| run.bytes));
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout; the fill or flush is over: it kept this value alive.
        unsafe { dealloc(self.buffer.as_ptr(), Self::layout(self.pages)) };
    }
}

/// Writes one run and waits for it.
pub fn write(
    wait_queue: &Arc<WaitQueue>,
    backend: &dyn Backend,
    page: u64,
    bytes: &[u8],
) -> Result<usize, FlushError> {
    let (flush, run) = Run::flush(wait_queue, page, bytes);
    backend.flush(vec![flush]);
    run.wait(backend)
}

pub fn read(wait_queue: &Arc<WaitQueue>, backend: &dyn Backend, page: u64, pages: usize) -> Vec<u8> {
    let (fill, run) = Run::fill(wait_queue, page, pages);
    backend.submit(vec![fill]);
    run.bytes(backend)
}

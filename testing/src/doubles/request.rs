//! Request: fills over ordinary memory, for the tests of backends.
//!
//! A [`Request`] is a fill's memory, its sink and its reader in one. Invariants: a fill ends once; what follows the
//! bytes delivered is zero when it has ended; the memory stays until both the fill and the test have released it.

#![allow(unsafe_code, reason = "fills are of memory by address")]

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use quinion::backend::{Backend, Fill, FillRun, FillSink, WaitQueue};
use quinion::internals::units::{Frame, PAGE_SIZE, PageIndex};

/// The byte that fills memory before a fill.
pub const UNTOUCHED: u8 = 0xa5;

/// A fill's memory and its end.
#[derive(Debug)]
pub struct Request {
    run: FillRun,
    buffer: NonNull<u8>,
    outcome: Mutex<Option<io::Result<usize>>>,
    is_done: AtomicBool,
    wait_queue: Arc<WaitQueue>,
}

// SAFETY: the buffer is written by the fill and read after its end, which `is_done` publishes.
unsafe impl Send for Request {}
// SAFETY: as above.
unsafe impl Sync for Request {}

impl Request {
    /// A fill of `pages` pages from `page` on, and where its end is seen.
    pub fn new(wait_queue: &Arc<WaitQueue>, page: u64, pages: u32) -> (Fill, Arc<Self>) {
        let layout = Self::layout(pages);
        // SAFETY: the layout is of at least one page.
        let buffer = NonNull::new(unsafe { alloc(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        // SAFETY: the memory is this long, and was allocated above.
        unsafe { buffer.as_ptr().write_bytes(UNTOUCHED, layout.size()) };
        let run = FillRun { index: PageIndex(page), frame: Frame(1), pages };
        let request = Arc::new(Self {
            run,
            buffer,
            outcome: Mutex::new(None),
            is_done: AtomicBool::new(false),
            wait_queue: Arc::clone(wait_queue),
        });
        // SAFETY: the sink, which the fill holds until it is completed, keeps the memory.
        let fill = unsafe { Fill::new(run, buffer, Arc::clone(&request) as Arc<dyn FillSink>) };
        (fill, request)
    }
    fn layout(pages: u32) -> Layout {
        Layout::from_size_align(pages as usize * PAGE_SIZE, PAGE_SIZE).expect("a size of some pages")
    }
    pub fn is_done(&self) -> bool {
        // Partner: the release in `fill_completed`.
        self.is_done.load(Ordering::Acquire)
    }
    /// Waits as a reader does. Returns the bytes delivered.
    pub fn wait(&self, backend: &dyn Backend) -> io::Result<Vec<u8>> {
        self.wait_queue.wait(backend, &mut || self.is_done());
        self.take()
    }
    /// The bytes delivered by a fill that has ended. Checks that zeros follow them.
    pub fn take(&self) -> io::Result<Vec<u8>> {
        assert!(self.is_done());
        let bytes = self.outcome.lock().unwrap().take().expect("taken once")?;
        let mut all = vec![0; self.run.pages as usize * PAGE_SIZE];
        // SAFETY: the fill has ended, so nothing writes there; both are that long.
        unsafe { self.buffer.as_ptr().copy_to_nonoverlapping(all.as_mut_ptr(), all.len()) };
        assert!(all[bytes..].iter().all(|&b| b == 0), "what follows the end is zero");
        all.truncate(bytes);
        Ok(all)
    }
}

impl FillSink for Request {
    fn fill_completed(&self, run: FillRun, result: io::Result<usize>) {
        assert_eq!(run, self.run);
        assert!(self.outcome.lock().unwrap().replace(result).is_none(), "a fill ends once");
        self.is_done.store(true, Ordering::Release); // partner: `is_done`
        self.wait_queue.wake();
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout; the fill is over: it kept this value alive.
        unsafe { dealloc(self.buffer.as_ptr(), Self::layout(self.run.pages)) };
    }
}

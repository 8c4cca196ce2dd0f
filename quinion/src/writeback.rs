//! Writeback: dirty pages to their files, one run at a time, by who asks for it.
//!
//! ```text
//!   begin_writeback --> a flush --> waited for --> end_writeback
//! ```
//!
//! The plainest thing that is right: whoever syncs writes, and nobody writes in the background.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Instant;

use crate::backend::{Flush, FlushError, FlushRun, FlushSink, SyncKind, WaitRoom};
use crate::errseq::ErrorCursor;
use crate::mapping::{Begun, DirtyPages, Leaving, Mapping, Outcome, Which, WritebackRun};
use crate::sync::Locks;
use crate::sync::lock::Mutex;
use crate::units::{Millis, PAGE_SIZE, PageIndex};
use crate::xarray::INDICES_MAX;

/// What takes dirty pages to their files.
#[derive(Debug)]
pub struct Writeback {
    totals: Arc<DirtyPages>,
    room: Arc<WaitRoom>,
    begun: Instant,
    files: Mutex<Vec<Weak<Mapping>>>,
}

impl Writeback {
    /// For waiters of `room`.
    pub fn new(room: Arc<WaitRoom>) -> Self {
        Self { totals: Arc::default(), room, begun: Instant::now(), files: Mutex::default() }
    }
    /// What is dirty of all files.
    pub fn totals(&self) -> &Arc<DirtyPages> {
        &self.totals
    }
    /// The moment, by this cache's clock.
    pub fn now(&self) -> Millis {
        Millis(self.begun.elapsed().as_millis() as u64)
    }
    /// Before a write.
    ///
    /// # Errors
    /// None so far.
    pub fn throttle(&self, mapping: &Arc<Mapping>, pages: u64) -> io::Result<()> {
        let _ = (mapping, pages);
        Ok(())
    }
    /// After a mark.
    pub fn note_dirty(&self, mapping: &Arc<Mapping>) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.retain(|file| file.strong_count() > 0);
        if !files.iter().any(|file| std::ptr::eq(file.as_ptr(), Arc::as_ptr(mapping))) {
            files.push(Arc::downgrade(mapping));
        }
    }
    /// Writes what is dirty in a range.
    pub fn start(&self, mapping: &Arc<Mapping>, pages: Range<PageIndex>) {
        let _ = self.write(mapping, pages);
    }
    /// The same, and makes it durable.
    ///
    /// # Errors
    /// The first that came.
    pub fn sync(
        &self,
        mapping: &Arc<Mapping>,
        pages: Range<PageIndex>,
        kind: SyncKind,
        cursor: &ErrorCursor,
    ) -> io::Result<()> {
        let bytes = pages.start.first_byte()..pages.end.0.min(INDICES_MAX >> 1).saturating_mul(4096);
        let written = self.write(mapping, pages);
        let synced = mapping.writes_by().map_or(Ok(()), |backend| backend.sync(kind, bytes));
        let told = mapping.device().errors().check_and_advance(cursor);
        written.and(synced).and(told.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno))))
    }
    /// Writes what is dirty of all files.
    pub fn write_out_all(&self) {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for file in files.iter().filter_map(Weak::upgrade) {
            let _ = self.write(&file, PageIndex(0)..PageIndex(INDICES_MAX));
        }
    }
    /// Nothing is left to do.
    pub fn close(&self) {}

    fn write(&self, mapping: &Arc<Mapping>, mut pages: Range<PageIndex>) -> io::Result<()> {
        let Some(backend) = mapping.writes_by() else { return Ok(()) };
        loop {
            let mut runs = Vec::new();
            let mut tree = mapping.lock();
            let begun = tree.begin_writeback(pages.clone(), Which::Dirty, 256, &mut runs);
            let size = mapping.size();
            drop(tree);
            for run in runs {
                let bytes =
                    size.saturating_sub(run.index.first_byte()).min(u64::from(run.pages) * PAGE_SIZE as u64);
                assert!(bytes > 0, "no dirty page lies behind the end: {run:?} of {size}");
                let one = Arc::new(One {
                    run,
                    mapping: Arc::clone(mapping),
                    now: self.now(),
                    outcome: Mutex::default(),
                });
                let buffer = NonNull::new(mapping.arena().view().bytes(run.frame).expect("it is held"))
                    .expect("it exists");
                let flush = FlushRun { index: run.index, frame: run.frame, bytes: bytes as usize };
                // SAFETY: write-back holds the folios until the end.
                backend.flush(vec![unsafe {
                    Flush::new(flush, buffer, Arc::clone(&one) as Arc<dyn FlushSink>)
                }]);
                let outcome = || one.outcome.lock().unwrap_or_else(PoisonError::into_inner);
                let room = Arc::clone(&self.room);
                while outcome().is_none() {
                    backend.reap(crate::backend::Reap::Ready, &mut || false);
                    room.wake();
                    std::thread::yield_now();
                }
                outcome().take().expect("it has ended").map_err(|error| error.error)?;
            }
            match begun {
                Begun::Done => return Ok(()),
                Begun::More(page) | Begun::Busy(page) => pages.start = page,
            }
        }
    }
}

struct One {
    run: WritebackRun,
    mapping: Arc<Mapping>,
    now: Millis,
    outcome: Mutex<Option<Result<(), FlushError>>>,
}

impl FlushSink for One {
    fn flush_completed(&self, run: FlushRun, outcome: Result<(), FlushError>) {
        if outcome.is_ok() {
            self.mapping.raise_size_on_device(run.index.first_byte() + run.bytes as u64);
        } else {
            self.mapping.device().errors().record(5);
        }
        let how = if outcome.is_ok() { Outcome::Written } else { Outcome::Failed };
        let ended = self.mapping.lock().end_writeback(self.run, how, self.now);
        if let Some(pages) = ended.behind {
            self.mapping.drop_behind(pages, Leaving::Passed, Locks::Wait);
        }
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
    }
}

//! Run: dirty pages become flushes, and the steps at their end.
//!
//! ```text
//!   hold   the invalidate lock, shared, until they are handed over: no cut or punch of the file in between
//!   take   size, tree lock:   pages not under way by index --> begin_writeback --> runs, each with a number
//!   hand                      a Flush each, in one call --> backend; or the last to be made here, when nothing is held
//!   end    any thread:        tree lock: length on the device, written pages clean, others dirty again, the account
//!                             dropped behind, if only uncached writers wanted it (D14)
//!          counted, all waiting threads woken
//! ```
//!
//! A page is known to be under way by its frame's bit, and by its index. The bit goes with the folio: when a pinned
//! folio is replaced by a copy while it is being written, the copy's pages must not overtake the flush under way.
//!
//! Invariants:
//!  1. Every run that was taken is handed to the backend; a flush that the backend drops ends as failed.
//!  2. The end of a flush takes the tree lock and no other lock that a thread holds while it waits.
//!  3. Of a flush that failed, the pages that were written count, and the others are dirty again.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::backend::{DeferredWakes, Flush, FlushError, FlushRun, FlushSink, Version};
use crate::mapping::writeback_state::{FlushNumber, FlushResult};
use crate::mapping::{DropReason, Mapping, TakeEnd, TakeFilter, WritebackOutcome, WritebackRun};
use crate::stats::Count;
use crate::sync::{LockWait, RankedReadGuard};
use crate::units::{PAGE_SIZE, PageIndex, pages_of_bytes};

use super::Writeback;
use super::attribute_checks::{CheckedBy, PreFlushCheck};

/// The number of an error that has none of the system's.
pub(super) const UNNAMED: i32 = libc::EIO;
/// Revalidations of a file that others cut again and again, until what other programs did to it counts as a change.
const REVALIDATIONS_MAX: u32 = 4;
/// Numbers of errors end here.
const ERRNO_END: i32 = 4096;

/// The sink of the flush of a run.
struct FlushInFlight {
    writeback: Arc<Writeback>,
    mapping: Arc<Mapping>,
    run: WritebackRun,
    number: FlushNumber,
}

/// A run that is under write-back, and not given to the backend yet.
struct TakenRun {
    run: WritebackRun,
    flush: FlushRun,
    number: FlushNumber,
}

pub(super) fn errno_of(error: &io::Error) -> i32 {
    match error.raw_os_error() {
        Some(errno) if (1..ERRNO_END).contains(&errno) => errno,
        _ if error.kind() == io::ErrorKind::StorageFull => libc::ENOSPC,
        _ => UNNAMED,
    }
}

#[derive(Clone, Debug)]
pub(super) struct FlushRequest {
    pub pages: Range<PageIndex>,
    pub which: TakeFilter,
    pub pages_max: u32,
    /// Whether a thread that cuts or punches the file is waited for.
    pub locks: LockWait,
    /// Whose thread waits for the file's attributes.
    pub checked_by: CheckedBy,
}

impl FlushRequest {
    /// For callers that must not wait: dirty pages of `pages`, `pages_max` of them at most.
    pub(super) fn without_waiting(pages: Range<PageIndex>, pages_max: u32) -> Self {
        Self {
            pages,
            which: TakeFilter::Dirty,
            pages_max,
            locks: LockWait::Try,
            checked_by: CheckedBy::Other,
        }
    }
}

impl Writeback {
    /// Starts writing the dirty pages of a request. Waits for the tree lock, whatever a file system makes a write wait
    /// for, and, if its `locks` says so, a thread that cuts or punches the file; and if its `checked_by` is the caller,
    /// for the file's attributes. If `locks` forbids that wait, or another thread is to revalidate the file, the call
    /// has done nothing, and the caller repeats it later.
    /// Returns where it has ended, as [`begin_writeback`] does: busy, with [`TakeFilter::ToWrite`] only, before pages
    /// that are under way.
    ///
    /// [`begin_writeback`]: crate::mapping::MappingGuard::begin_writeback
    pub(super) fn write_some(&self, mapping: &Arc<Mapping>, request: FlushRequest) -> TakeEnd {
        let Some(writer) = mapping.writeback().writer() else { return TakeEnd::Done };
        let (mut runs, mut flushes) = (Vec::new(), Vec::new());
        // Where a look may wait, a clean file is not looked at: there is nothing to write.
        let skips_revalidation =
            writer.attributes_may_wait() && mapping.writeback().dirty_pages().dirty() == 0;
        // A backend may complete inside the call, and a waker, foreign code, may want the locks that are held here.
        let wakes = DeferredWakes::new();
        let held_off = match skips_revalidation {
            true => mapping.hold_off_invalidation_as(request.locks),
            false => self.revalidate_and_hold_off(mapping, &request),
        };
        let Some(held_off) = held_off else { return TakeEnd::More(request.pages.start) };
        let begun = self.take(mapping, &request, &mut runs);
        let mut here = None;
        if !runs.is_empty() {
            if skips_revalidation {
                mapping.note_unknown_change(); // it was written to meanwhile, and nothing has looked
            }
            self.in_flight.fetch_add(runs.len() as u64, Ordering::Relaxed);
            self.note_begun(mapping, runs.iter().map(|taken| taken.run.pages).sum());
            flushes.extend(runs.into_iter().map(|run| self.flush_of(mapping, run)));
            // A sync waits for all pages it takes, the last one too; the background waits for nothing.
            if request.which == TakeFilter::ToWrite {
                here = flushes.pop_if(|last| writer.flushes_here(last));
            }
            if !flushes.is_empty() {
                writer.flush(flushes);
            }
        }
        drop(held_off);
        drop(wakes);
        if let Some(last) = here {
            writer.flush_here(last);
        }
        begun
    }

    /// Looks at the file if that is due, and keeps others from cutting it. `None`: the caller comes again later. While
    /// this thread waits for one that cuts the file, other programs may change it: so it is looked at behind that wait.
    fn revalidate_and_hold_off<'m>(
        &self,
        mapping: &'m Arc<Mapping>,
        request: &FlushRequest,
    ) -> Option<RankedReadGuard<'m, Version>> {
        for _ in 0..REVALIDATIONS_MAX {
            if self.revalidate_before_flush(mapping, request.checked_by, request.locks)
                == PreFlushCheck::Elsewhere
            {
                return None;
            }
            let held_off = mapping.try_hold_off_invalidation();
            if held_off.is_some() || request.locks == LockWait::Try {
                return held_off;
            }
        }
        let held_off = mapping.hold_off_invalidation();
        mapping.note_unknown_change();
        Some(held_off)
    }

    fn take(&self, mapping: &Mapping, request: &FlushRequest, out: &mut Vec<TakenRun>) -> TakeEnd {
        let FlushRequest { pages, which, pages_max, .. } = request;
        let (mut at, mut left, mut runs) = (pages.start, *pages_max, Vec::new());
        let mut guard = mapping.lock();
        let (size, state) = (mapping.size(), mapping.writeback());
        let end = pages.end.min(PageIndex(pages_of_bytes(size)));
        while at < end {
            let clear = state.first_clear(at..end);
            if clear.start > at && *which == TakeFilter::ToWrite {
                return TakeEnd::Busy(at);
            }
            let begun = guard.begin_writeback(clear.clone(), *which, left, &mut runs);
            for run in runs.drain(..) {
                left -= run.pages;
                let first = run.index.first_byte();
                let bytes = (size - first).min(u64::from(run.pages) * PAGE_SIZE as u64) as usize;
                let number = state.begin_flush(run.index..run.end());
                let flush = FlushRun { index: run.index, frame: run.frame, bytes };
                out.push(TakenRun { run, flush, number });
            }
            match begun {
                TakeEnd::Done if clear.is_empty() => return TakeEnd::Done, // all that is left is under way
                TakeEnd::Done => at = clear.end,
                stopped => return stopped,
            }
        }
        TakeEnd::Done
    }

    fn flush_of(&self, mapping: &Arc<Mapping>, taken: TakenRun) -> Flush {
        let TakenRun { run, flush, number } = taken;
        let bytes = self.arena.view().bytes(run.frame).expect("a run of ours exists");
        let buffer = NonNull::new(bytes).expect("no frame is at address 0");
        let writeback = self.me.upgrade().expect("it is being used");
        let sink = Arc::new(FlushInFlight { writeback, mapping: Arc::clone(mapping), run, number });
        // SAFETY: write-back holds the run's folios until `end_writeback`, which the sink calls, so its frames are not
        // freed before; the sink keeps the arena mapped; a writer that changes the bytes meanwhile does so by
        // `copy_in`.
        unsafe { Flush::new(flush, buffer, sink as Arc<dyn FlushSink>) }
    }
}

impl FlushSink for FlushInFlight {
    fn flush_completed(&self, flush: FlushRun, outcome: Result<(), FlushError>) {
        let (writeback, mapping, now) = (&self.writeback, &self.mapping, self.writeback.now());
        let (bytes, errno) = match &outcome {
            Ok(()) => (flush.bytes, None),
            Err(failed) => (failed.written.min(flush.bytes - 1), Some(errno_of(&failed.error))),
        };
        // A page that was written in part was not written, but for the last one of the file.
        let whole = if errno.is_none() { self.run.pages } else { (bytes / PAGE_SIZE) as u32 };
        let mut guard = mapping.lock();
        let state = mapping.writeback();
        let written = state.valid_pages(self.number, whole);
        // First the length, so that a thread that finds a page clean finds it on the device.
        if bytes > 0 {
            mapping.writeback().raise_size_on_device(self.run.index.first_byte() + bytes as u64);
        }
        let behind = self.settle(&mut guard, written, now);
        state.end_flush(self.number, FlushResult { written, errno }, now);
        drop(guard);
        if let Some(behind) = behind {
            mapping.drop_behind(behind, DropReason::Written, LockWait::Wait);
        }
        writeback.revalidate_after_flush(mapping);
        writeback.note_ended(mapping, self.run.pages, bytes > 0);
        writeback.count_flush(written, bytes, errno);
        writeback.wait_queue.wake();
    }
}

impl FlushInFlight {
    /// Returns the positions of folios that may leave now.
    fn settle(
        &self,
        guard: &mut crate::mapping::MappingGuard<'_>,
        written: u32,
        now: crate::units::Millis,
    ) -> Option<Range<PageIndex>> {
        let WritebackRun { index, frame, pages } = self.run;
        let part = |from: u32, pages: u32| WritebackRun {
            index: index.plus(u64::from(from)),
            frame: frame.plus(from),
            pages,
        };
        let mut behind = None;
        if written > 0 {
            behind = guard.end_writeback(part(0, written), WritebackOutcome::Written, now).behind;
        }
        if written < pages {
            guard.end_writeback(part(written, pages - written), WritebackOutcome::Failed, now);
        }
        behind
    }
}

impl Writeback {
    fn count_flush(&self, pages: u32, bytes: usize, errno: Option<i32>) {
        let counters = &self.counters;
        counters.add(Count::DeviceWrites, 1);
        counters.add(Count::DeviceWrittenBytes, bytes as u64);
        counters.add(Count::WrittenPages, u64::from(pages));
        counters.add(Count::DeviceWriteErrors, u64::from(errno.is_some()));
        self.written.fetch_add(u64::from(pages), Ordering::Relaxed);
        self.completed.fetch_add(1, Ordering::Relaxed);
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

//! Sync: dirty pages are written, waited for, and made durable.
//!
//! ```text
//!   1 tag        the dirty entries of the range: those, and no others, are written            (later dirtying cannot
//!   2 write      the tagged, some megabytes under way at a time                                prolong it)
//!   3 wait       for all flushes of the range that have begun by now
//!   4 durable    backend.sync; one at a time for a file, and one that began late enough serves all waiting callers
//!   5 report     what failed since this call began, or what this handle has not reported yet
//! ```
//!
//! Step 2 meets pages that are under way already. If their flush began before the tags were set, it may not have the
//! bytes that are promised, and is waited for. If it began later, it has them, and step 3 waits for it. So each page is
//! waited for once here, however often others write it.
//!
//! Of a file that this cache does not write, only step 4 is left: `Ok` also says that earlier writes by other processes
//! are durable, as the system's own call does by a descriptor that can only read.
//!
//! Pages that were written meanwhile, but were under way when another caller's sync failed, do not count: they are
//! dirty again, and may have been clean when the tags were set. Then steps 1 to 3 are done once more.
//!
//! After a failure the other pages are written, and the device is synced. Then the first error of this call is told.
//!
//! **Why a failure of the file since the call began is told, whosever it was.** Of two threads that sync at once, the
//! one's flush of a page that both want may fail; or the sync of the one may be told of the kernel's error, which is
//! told once. Either way the other's pages are not durable. So anything that fails meanwhile fails both: it may be an
//! error too many; `Ok` would be a lie if not.
//!
//! Invariants:
//!  1. `Ok` is returned only if all flushes that the call waited for went well, and so did a `backend.sync` that
//!     began after they had ended.
//!  2. A call ends, however much others write: the tagged pages are finite, and each is waited for once.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread;

use crate::backend::{Backend, SyncKind};
use crate::errseq::ErrorCursor;
use crate::mapping::writeback_state::{BegunSync, Commit, Failures, FlushNumber, SyncRange};
use crate::mapping::{Mapping, TakeEnd, TakeFilter};
use crate::stats::Count;
use crate::sync::{LockWait, contained};
use crate::units::{PageIndex, pages_of_bytes};

use super::Writeback;
use super::attribute_checks::CheckedBy;
use super::run::{FlushRequest, UNNAMED, errno_of};

/// Pages of a file that a sync has under way at most: 16 MiB.
const UNDER_WAY_MAX: u64 = 4096;

/// At the end of a cache so many devices' files are written by threads beside the last one's.
const ENDS_MAX: usize = 32;

/// A sync that failed.
#[derive(Debug, thiserror::Error)]
#[error("{error}{}", lost_words(*.lost_pages))]
pub struct SyncFailed {
    /// Why.
    #[source]
    pub error: io::Error,
    /// Pages that were in the file, and not durable, and are no longer cached: this cache cannot write them
    /// again. It may be more than were written.
    pub lost_pages: u64,
}

/// The file of a sync, and the backend that writes it.
#[derive(Clone, Copy)]
struct WrittenFile<'s> {
    mapping: &'s Arc<Mapping>,
    writer: &'s dyn Backend,
}

fn lost_words(pages: u64) -> String {
    match pages {
        0 => String::new(),
        1 => " (a page that is no longer cached may be lost; write it again)".into(),
        _ => format!(" (up to {pages} pages that are no longer cached may be lost; write them again)"),
    }
}

impl Writeback {
    /// Writes the dirty pages of `range`, waits for them and for flushes under way there, and makes them durable.
    /// Returns the error that `cursor`'s handle has not reported yet. Waits for the device; the caller holds no lock of
    /// the index.
    ///
    /// # Errors
    /// Something of this file failed since the call began, or failed before and this handle was not told. Pages that
    /// failed are dirty still, and the next call tries again.
    pub fn sync(
        &self,
        mapping: &Arc<Mapping>,
        range: SyncRange<'_>,
        cursor: &ErrorCursor,
    ) -> Result<(), SyncFailed> {
        self.counters.add(Count::Syncs, 1);
        let (state, mut lost_pages) = (mapping.writeback(), 0);
        let before = state.failures();
        // 1 to 4
        if let Some(writer) = mapping.writeback().writer() {
            let file = WrittenFile { mapping, writer: &**writer };
            loop {
                let voided = state.flushes_voided();
                self.write_tagged(file, range.pages.clone());
                if state.flushes_voided() == voided || state.failures() != before {
                    break;
                }
            }
            lost_pages = self.make_durable(file, range);
            self.revalidate_after_sync(mapping, file.writer);
        } else if let Err(error) = mapping.backend().sync_others(range.kind) {
            // This cache does not write it; writes by other processes are to be durable, too.
            self.counters.add(Count::SyncErrors, 1);
            return Err(SyncFailed { error, lost_pages });
        }
        // 5
        let news = state.errors().check_and_advance(cursor);
        let failed = failed_since(before, state.failures()).or(news);
        let Some(errno) = failed else { return Ok(()) };
        self.counters.add(Count::SyncErrors, 1);
        Err(SyncFailed { error: io::Error::from_raw_os_error(errno), lost_pages })
    }

    /// Makes durable all that was flushed to a file without handles. Its pages are dirty again if that fails, as far as
    /// they are cached; the error is told by a later sync. Waits for the device; the caller holds no lock.
    pub fn make_flushed_durable(&self, mapping: &Arc<Mapping>) {
        if let Some(writer) = mapping.writeback().writer() {
            let range = SyncRange { kind: SyncKind::All, pages: &whole_file() };
            let _lost = self.make_durable(WrittenFile { mapping, writer: &**writer }, range); // it is counted
        }
    }

    /// Starts writing the dirty ones of `pages`, a few megabytes; more is left to the background. Waits for none of it.
    pub fn start(&self, mapping: &Arc<Mapping>, pages: Range<PageIndex>) {
        let capacity = UNDER_WAY_MAX.saturating_sub(mapping.writeback().dirty_pages().writeback()) as u32;
        match self.write_some(mapping, FlushRequest::without_waiting(pages, capacity)) {
            TakeEnd::Done => self.wake(), // it fetches completions that no other thread fetches
            TakeEnd::More(_) | TakeEnd::Busy(_) => self.request_writeback(mapping),
        }
    }

    /// Writes all that is dirty, and waits for it. Nothing is durable by that. For a mapping that is to end.
    ///
    /// # Errors
    /// Some of it could not be written, and is dirty still. Every handle is told of it by its next sync.
    pub fn write_out(&self, mapping: &Arc<Mapping>) -> io::Result<()> {
        let before = mapping.writeback().failures();
        if let Some(writer) = mapping.writeback().writer() {
            self.write_tagged(WrittenFile { mapping, writer: &**writer }, whole_file());
        }
        match failed_since(before, mapping.writeback().failures()) {
            None => Ok(()),
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Writes out the dirty pages of every file, and ends the background: for the end of a cache. Waits for the
    /// devices, one beside the other: if one never answers, the pages of the others are written all the same, unless
    /// there are more than 33 devices, or the system has no thread. Makes nothing durable. Returns the files that could
    /// not be written.
    pub fn write_out_all(&self) -> u64 {
        let mut devices: BTreeMap<u64, Vec<Arc<Mapping>>> = BTreeMap::new();
        for mapping in self.listed() {
            devices.entry(mapping.identity().shared_device()).or_default().push(mapping);
        }
        let devices: Vec<_> = devices.into_values().collect();
        let (others, own) = devices.split_at(devices.len().saturating_sub(1).min(ENDS_MAX));
        thread::scope(|scope| {
            let begun = others.iter().map(|files| {
                let end = move || {
                    crate::sys::signal::block_all();
                    self.write_out_files(files)
                };
                thread::Builder::new().name("quinion-end".into()).spawn_scoped(scope, end).map_err(|_| files)
            });
            let (mut threads, mut here) = (Vec::new(), Vec::new());
            for thread in begun {
                match thread {
                    Ok(thread) => threads.push(thread),
                    Err(files) => here.push(files), // the system has no thread
                }
            }
            // All that this thread is to write before it waits for others: for their threads, or the background's,
            // which may be at the submission to a device that hangs.
            here.extend(own);
            let mut failed: u64 = here.into_iter().map(|files| self.write_out_files(files)).sum();
            self.close();
            for thread in threads {
                failed += thread.join().unwrap_or_else(|panic| resume_unwind(panic));
            }
            failed
        })
    }

    fn write_out_files(&self, files: &[Arc<Mapping>]) -> u64 {
        let mut failed = 0;
        for mapping in files {
            // A backend that panics has failed, and keeps no other file from being written.
            let write_out = || contained(|| self.write_out(mapping).is_ok()) == Some(true);
            // A flush of the background that failed was not this call's attempt: it is now.
            let is_written = write_out() && mapping.writeback().dirty_pages().dirty() == 0;
            failed += u64::from(!is_written && !write_out());
            self.counters.add(Count::LostPages, mapping.writeback().dirty_pages().dirty());
        }
        failed
    }

    /// Starts writing the dirty pages of every file, and waits for no device, nor for a look: for the end of a cache.
    pub fn start_all(&self) {
        for mapping in self.listed() {
            let mut at = PageIndex(0);
            let request = |at| FlushRequest {
                checked_by: CheckedBy::NoThread,
                ..FlushRequest::without_waiting(at..whole_file().end, u32::MAX)
            };
            while let TakeEnd::More(next) | TakeEnd::Busy(next) = self.write_some(&mapping, request(at))
                && next > at
            {
                at = next;
            }
        }
    }

    /// Waits until no flush of `pages` is under way, also of folios that have left the index: for a caller that takes
    /// their place in the file away. The caller may hold the locks of a write, and none of the index. None begins
    /// meanwhile if the pages are gone from the index.
    pub fn wait_for(&self, mapping: &Mapping, pages: Range<PageIndex>) {
        if let Some(writer) = mapping.writeback().writer() {
            let state = mapping.writeback();
            self.wait_queue.wait(&**writer, &mut || !state.is_under_way(&pages, None));
        }
    }

    fn write_tagged(&self, file: WrittenFile<'_>, pages: Range<PageIndex>) {
        let WrittenFile { mapping, writer } = file;
        let state = mapping.writeback();
        let end = pages.end.min(PageIndex(pages_of_bytes(mapping.size())));
        let mut at = pages.start;
        while at < end {
            at = mapping.lock().tag_to_write(at..end);
        }
        let tagged = state.next_flush();
        let mut at = pages.start;
        loop {
            self.wait_for_capacity(file);
            let (which, pages_max) = (TakeFilter::ToWrite, (UNDER_WAY_MAX / 2) as u32);
            let (locks, checked_by) = (LockWait::Wait, CheckedBy::Caller);
            let request = FlushRequest { pages: at..end, which, pages_max, locks, checked_by };
            match self.write_some(mapping, request) {
                TakeEnd::Done => break,
                TakeEnd::More(next) => at = next,
                TakeEnd::Busy(page) => at = self.pass(file, page, tagged),
            }
        }
        let begun = Some(state.next_flush());
        self.wait_queue.wait(writer, &mut || !state.is_under_way(&pages, begun));
    }

    fn wait_for_capacity(&self, WrittenFile { mapping, writer }: WrittenFile<'_>) {
        let under_way = || mapping.writeback().dirty_pages().writeback();
        if under_way() > UNDER_WAY_MAX / 2 {
            self.wait_queue.wait(writer, &mut || under_way() <= UNDER_WAY_MAX / 2);
        }
    }

    /// The page is under way: where to go on. Its flush is waited for if it began before the tags were set.
    fn pass(&self, file: WrittenFile<'_>, page: PageIndex, tagged: FlushNumber) -> PageIndex {
        let state = file.mapping.writeback();
        match state.flush_at(page) {
            None => page,
            Some((number, end)) if number >= tagged => end,
            Some((number, _)) => {
                let is_over = || state.flush_at(page).is_none_or(|(other, _)| other != number);
                self.wait_queue.wait(file.writer, &mut || is_over());
                page
            }
        }
    }

    /// Step 4. Returns how many pages this cache has lost by a sync that failed.
    fn make_durable(&self, file: WrittenFile<'_>, range: SyncRange<'_>) -> u64 {
        let state = file.mapping.writeback();
        let seen = state.syncs_begun();
        loop {
            match state.begin_sync(range, seen) {
                Commit::Shared => return 0,
                Commit::Wait => self.wait_queue.sleep(&mut || !state.is_syncing()),
                Commit::Own(taken) => return self.sync_device(file, BegunSync { range, taken }),
            }
        }
    }

    /// Returns the lost pages, if that failed.
    fn sync_device(&self, file: WrittenFile<'_>, begun: BegunSync<'_>) -> u64 {
        let (WrittenFile { mapping, writer }, SyncRange { kind, pages }) = (file, begun.range);
        let bytes = pages.start.first_byte()..pages.end.0.saturating_mul(crate::units::PAGE_SIZE as u64);
        self.counters.add(Count::DeviceSyncs, 1);
        // A backend is foreign code. If it panics it has made nothing durable, and does not keep the turn.
        let outcome = catch_unwind(AssertUnwindSafe(|| writer.sync(kind, bytes)));
        let lost = match &outcome {
            Ok(Ok(())) => {
                mapping.writeback().end_sync(begun, None, self.now());
                0
            }
            Ok(Err(error)) => self.dirty_again(mapping, begun, errno_of(error)),
            Err(_) => self.dirty_again(mapping, begun, UNNAMED),
        };
        self.wait_queue.wake();
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
        lost
    }

    /// Marks flushed pages dirty again that are not durable. Returns how many of them are not cached any more.
    #[cold]
    fn dirty_again(&self, mapping: &Arc<Mapping>, begun: BegunSync<'_>, errno: i32) -> u64 {
        let now = self.now();
        let mut guard = mapping.lock();
        // Under one hold of the lock: no flush ends between the two as if it were good.
        let again = mapping.writeback().end_sync(begun, Some(errno), now);
        let end = PageIndex(pages_of_bytes(mapping.size()));
        let inside = |range: Range<PageIndex>| range.start..range.end.min(end);
        let mut lost = 0;
        for range in again.iter().map(inside).filter(|range| !range.is_empty()) {
            lost += (range.end.0 - range.start.0) - guard.mark_cached_dirty(range, now);
        }
        drop(guard);
        self.counters.add(Count::DeviceSyncErrors, 1);
        self.counters.add(Count::LostPages, lost);
        self.note_dirty(mapping);
        lost
    }
}

fn whole_file() -> Range<PageIndex> {
    PageIndex(0)..PageIndex(crate::xarray::INDICES_MAX)
}

/// The first error that is known of those since `before`. (If there were several, the last is.)
fn failed_since(before: Failures, now: Failures) -> Option<i32> {
    (now.count != before.count).then_some(now.errno)
}

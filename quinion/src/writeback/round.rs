//! Round: the background's turn, and write-back for a caller that needs memory.
//!
//! ```text
//!   a round      fetch completions that no other thread fetches
//!                each file in turn:  nothing dirty?                      forget it
//!                                    old, asked for, or too much is?     go on with the pass
//!                the next round begins with another file
//!   a pass      from where the last round stopped to the file's end; then from its start
//!   the next     soon while something is under way, later the longer nothing comes of it; else at the interval
//! ```
//!
//! Little at a time, of every file in turn, so that no file waits for the end of another, and readers do not stand
//! behind more than that in a queue of their device: some gigabytes in a second.
//!
//! A pass takes a page once; pages that are dirtied again behind it are left to the next pass. When it has come to the
//! end, all that was dirty when it began has been taken.
//!
//! Invariants:
//!  1. A round waits for no device, nor for a file's times (`looks.rs`). (A file system may make a write wait; then it is
//!     this thread that waits.)
//!  2. Files whose flushes never end keep no other from being written.
//!  3. A file that failed is left alone until its pause is over, but by a thread that needs memory.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::backend::ReapMode;
use crate::background::BackgroundTask;
use crate::mapping::{Mapping, TakeEnd};
use crate::sync::contained;
use crate::units::PageIndex;
use crate::xarray::INDICES_MAX;

use super::Writeback;
use super::looks::Looker;
use super::plan::{FileDirtyState, FlushScope, is_due};
use super::run::FlushRequest;

/// The most pages of one file that the background has under way: 4 MiB.
const FILE_PAGES_MAX: u64 = 1024;
/// And of all files: 16 MiB.
const ALL_PAGES_MAX: u64 = 4096;
/// While nothing ends, a file that has nothing under way may have so many beyond that: devices that never answer keep
/// their share.
const FIRST_PAGES: u64 = 64;
/// From one round to the next while something is under way.
const SOON: Duration = Duration::from_millis(1);
/// The same, when nothing has come of it for long.
const LATER: Duration = Duration::from_millis(64);

#[derive(Debug)]
pub(super) struct RoundInterval {
    after: Duration,
    completed: u64,
    scope: FlushScope,
}

impl Default for RoundInterval {
    fn default() -> Self {
        Self { after: SOON, completed: 0, scope: FlushScope::Due }
    }
}

impl RoundInterval {
    fn is_stuck(&self) -> bool {
        self.after >= LATER
    }

    /// After how long to come again while something is under way, `completed` flushes having ended so far.
    fn step(&mut self, completed: u64) -> Duration {
        self.after = if completed == self.completed { (self.after * 2).min(LATER) } else { SOON };
        self.completed = completed;
        self.after
    }
}

impl BackgroundTask for Writeback {
    fn run(&self) -> Option<Duration> {
        self.fetch_completions();
        let files = self.listed();
        let scope = {
            let mut pace = self.pace.lock().unwrap_or_else(PoisonError::into_inner);
            let (limits, unwritten) = (self.limits(), self.totals.total());
            let wants_all = match pace.scope {
                FlushScope::Due => limits.begins_all(unwritten),
                FlushScope::All => limits.continues_all(unwritten),
            };
            pace.scope = if wants_all { FlushScope::All } else { FlushScope::Due };
            pace.scope
        };
        for mapping in &files {
            if self.background.is_closed() {
                return None;
            }
            // A backend is foreign code; if it panics, the other files are visited all the same.
            contained(|| self.visit_file(mapping, scope));
        }
        self.next_turn();
        let (in_flight, completed) = self.flushes();
        self.is_awake.store(in_flight > 0, Ordering::Relaxed);
        if in_flight > 0 {
            Some(self.pace.lock().unwrap_or_else(PoisonError::into_inner).step(completed))
        } else if self.files_listed() > 0 {
            Some(self.options.interval.max(SOON))
        } else {
            None
        }
    }
}

impl Writeback {
    fn fetch_completions(&self) {
        if let Some(writer) = self.idle_backend() {
            writer.reap(ReapMode::Ready, &mut || false);
        }
    }

    fn next_turn(&self) {
        let mut files = self.files();
        if !files.is_empty() {
            files.rotate_left(1);
        }
    }

    fn visit_file(&self, mapping: &Arc<Mapping>, scope: FlushScope) {
        if mapping.writeback().dirty_pages().total() == 0 {
            return self.unlist_clean(mapping);
        }
        if let Some(writer) = mapping.writeback().writer()
            && writer.wants_leader()
        {
            writer.reap(ReapMode::Ready, &mut || false);
        }
        let state = mapping.writeback();
        let seen = FileDirtyState {
            since: mapping.writeback().dirty_since(),
            paused_until: state.paused_until(),
            is_asked: state.is_pass_requested(),
        };
        if is_due(&seen, self.now(), self.options.expire, scope) {
            self.run_pass(mapping);
        }
    }

    /// Goes on with the pass of a file, as far as little may be under way.
    pub(super) fn run_pass(&self, mapping: &Arc<Mapping>) {
        self.run_pass_after(mapping, Looker::Other);
    }

    /// As [`Writeback::run_pass`]; `looker` looks at the file before.
    pub(super) fn run_pass_after(&self, mapping: &Arc<Mapping>, looker: Looker) {
        let (own, all) = (mapping.writeback().dirty_pages().writeback(), self.totals.writeback());
        let is_stuck = || self.pace.lock().unwrap_or_else(PoisonError::into_inner).is_stuck();
        let least = if own == 0 && is_stuck() { FIRST_PAGES } else { 0 };
        let left = FILE_PAGES_MAX.saturating_sub(own).min(ALL_PAGES_MAX.saturating_sub(all));
        let capacity = left.max(least) as u32;
        let has_capacity = mapping.writeback().writer().is_some_and(|writer| writer.has_capacity(1));
        if capacity == 0 || !has_capacity {
            return;
        }
        let state = mapping.writeback();
        let place = state.begin_pass(self.now());
        let pages = place.at..PageIndex(INDICES_MAX);
        // A thread that cuts the file may be waiting for a device, and this is not the thread to wait with it.
        let request = FlushRequest { looker, ..FlushRequest::without_waiting(pages, capacity) };
        match self.write_some(mapping, request) {
            TakeEnd::More(at) | TakeEnd::Busy(at) => state.pause_pass(place, at),
            TakeEnd::Done => {
                mapping.lock().note_round(place.began);
                state.end_pass(place);
            }
        }
    }

    /// Starts to write some dirty pages, old or not, because memory is wanted. Returns whether anything is under way.
    pub fn write_for_reclaim(&self) -> bool {
        if self.totals.dirty() > 0 {
            for mapping in self.listed() {
                self.run_pass(&mapping);
            }
            self.next_turn();
        }
        self.flushes().0 > 0
    }

    /// Asks the background to write a file's dirty pages soon, so that many small uncached writes (D14) go together.
    pub fn request_writeback(&self, mapping: &Mapping) {
        mapping.writeback().request_pass();
        self.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_slows_down_while_nothing_ends() {
        let mut pace = RoundInterval::default();
        let millis: Vec<u128> = [1, 1, 1, 2, 2].map(|completed| pace.step(completed).as_millis()).into();
        assert_eq!(millis, [1, 2, 4, 1, 2]);
        (0..20).for_each(|_| {
            pace.step(2);
        });
        assert_eq!(pace.after, LATER);
    }
}

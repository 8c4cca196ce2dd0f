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
//! behind more than that in a queue of their device: some gigabytes in a second. So the bound is a device's: those that
//! hang take nothing of it from others.
//!
//! A pass takes a page once; pages that are dirtied again behind it are left to the next pass. When it has come to the
//! end, all that was dirty when it began has been taken.
//!
//! Invariants:
//!  1. A round waits for no device, nor for a file's times (`attribute_checks.rs`). (A file system may make a write
//!     wait; then it is this thread that waits.)
//!  2. Files whose flushes never end keep no other from being written; those of another device take nothing of its
//!     bound.
//!  3. A file that failed is left alone until its pause is over, but by a thread that needs memory.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use crate::backend::ReapMode;
use crate::background::BackgroundTask;
use crate::mapping::{Mapping, TakeEnd};
use crate::sync::contained;
use crate::units::{Millis, PageIndex};
use crate::xarray::INDICES_MAX;

use super::Writeback;
use super::attribute_checks::CheckedBy;
use super::plan::{FileDirtyState, FlushScope, is_due};
use super::run::FlushRequest;
use super::stuck::device_of;

/// The most pages of one file that the background has under way: 4 MiB.
const FILE_PAGES_MAX: u64 = 1024;
/// The most pages of all files of a device that the background has under way: 16 MiB.
const DEVICE_PAGES_MAX: u64 = 4096;
/// While nothing of a device ends, a file that has nothing under way may have so many beyond that: what seems to be one
/// device may be several, of which some never answer.
const FIRST_PAGES: u64 = 64;
/// A device from which no flush has ended for so long counts as stuck.
const STUCK: Duration = Duration::from_millis(128);
/// From one round to the next while something is under way.
const SOON: Duration = Duration::from_millis(1);
/// From one round to the next, when no flush under way has ended for long.
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

/// The pages that are under way to one device; none, if it failed last.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct DeviceLoad {
    pages: u64,
    /// When it has taken a page last, or the first of these flushes has begun.
    moved: Millis,
}

impl DeviceLoad {
    /// How many more pages of a file may go, of which `own` are under way.
    fn capacity(self, own: u64, now: Millis) -> u64 {
        let is_stuck = self.pages > 0 && self.takes_nothing(now, STUCK);
        let least = if own == 0 && is_stuck { FIRST_PAGES } else { 0 };
        let left = FILE_PAGES_MAX.saturating_sub(own).min(DEVICE_PAGES_MAX.saturating_sub(self.pages));
        left.max(least)
    }

    fn takes_nothing(self, now: Millis, hang_time: Duration) -> bool {
        u128::from(now.0.saturating_sub(self.moved.0)) >= hang_time.as_millis()
    }

    /// Whether the device is still of interest: something is under way, or it `took` nothing.
    fn end(&mut self, pages: u64, took: bool, now: Millis) -> bool {
        self.pages -= pages;
        if took {
            self.moved = now;
        }
        self.pages > 0 || !took
    }
}

impl RoundInterval {
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
        self.forget_idle_devices();
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
        self.run_pass_after(mapping, CheckedBy::Other);
    }

    /// As [`Writeback::run_pass`]; `checked_by` revalidates the file before.
    pub(super) fn run_pass_after(&self, mapping: &Arc<Mapping>, checked_by: CheckedBy) {
        let own = mapping.writeback().dirty_pages().writeback();
        let capacity = self.load_of(mapping).capacity(own, self.now()) as u32;
        let has_capacity = mapping.writeback().writer().is_some_and(|writer| writer.has_capacity(1));
        if capacity == 0 || !has_capacity {
            return;
        }
        let state = mapping.writeback();
        let place = state.begin_pass(self.now());
        let pages = place.at..PageIndex(INDICES_MAX);
        // A thread that cuts the file may be waiting for a device, and this is not the thread to wait with it.
        let request = FlushRequest { checked_by, ..FlushRequest::without_waiting(pages, capacity) };
        match self.write_some(mapping, request) {
            TakeEnd::More(at) | TakeEnd::Busy(at) => state.pause_pass(place, at),
            TakeEnd::Done => {
                mapping.lock().note_round(place.began);
                state.end_pass(place);
            }
        }
    }

    fn load_of(&self, mapping: &Mapping) -> DeviceLoad {
        self.devices().get(&device_of(mapping)).copied().unwrap_or_default()
    }

    pub(super) fn note_begun(&self, mapping: &Mapping, pages: u32) {
        let (mut devices, now) = (self.devices(), self.now());
        let first = DeviceLoad { pages: 0, moved: now };
        devices.entry(device_of(mapping)).or_insert(first).pages += u64::from(pages);
    }

    /// A flush of `pages` pages has ended; `took`: the device has taken some of its bytes.
    pub(super) fn note_ended(&self, mapping: &Mapping, pages: u32, took: bool) {
        let (mut devices, now, device) = (self.devices(), self.now(), device_of(mapping));
        let load = devices.get_mut(&device).expect("a flush that ends has begun");
        if !load.end(u64::from(pages), took, now) {
            devices.remove(&device);
        }
    }

    /// Devices that were given flushes, or failed last, and have taken no page for so long.
    pub(super) fn devices_without_flushes_taken(&self, hang_time: Duration) -> BTreeSet<u64> {
        let (now, devices) = (self.now(), self.devices());
        let hung = devices.iter().filter(|(_, load)| load.takes_nothing(now, hang_time));
        hung.map(|(&device, _)| device).collect()
    }

    /// A device that failed last, and of which no file is dirty any more, is forgotten.
    fn forget_idle_devices(&self) {
        let is_idle = |load: &DeviceLoad| load.pages == 0;
        if self.devices().values().any(is_idle) {
            let listed: BTreeSet<u64> = self.files().iter().map(|mapping| device_of(mapping)).collect();
            self.devices().retain(|device, load| !is_idle(load) || listed.contains(device));
        }
    }

    fn devices(&self) -> MutexGuard<'_, BTreeMap<u64, DeviceLoad>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
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
    fn a_device_that_is_stuck_gives_a_little_to_each_file_and_no_other_is_asked() {
        let (full, moved) = (DEVICE_PAGES_MAX, Millis(1000));
        let later = Millis(moved.0 + STUCK.as_millis() as u64);
        for (pages, own, now, capacity) in [
            (0, 0, later, FILE_PAGES_MAX),
            (1000, 1000, moved, FILE_PAGES_MAX - 1000),
            (full - 10, 0, moved, 10),
            (full - 10, 0, later, FIRST_PAGES),
            (full + 10, 0, moved, 0),
            (full + 10, 0, later, FIRST_PAGES),
            (full, 1, later, 0),
        ] {
            assert_eq!(
                DeviceLoad { pages, moved }.capacity(own, now),
                capacity,
                "{pages} pages, {own} of it"
            );
        }
    }

    #[test]
    fn a_device_takes_nothing_until_a_flush_ends_of_which_it_took_a_part() {
        let (begun, hang_time) = (Millis(1000), Duration::from_millis(500));
        let mut load = DeviceLoad { pages: 30, moved: begun };
        assert!(!load.takes_nothing(Millis(1499), hang_time) && load.takes_nothing(Millis(1500), hang_time));
        // It fails, also the last flush: that is no progress, and it is not forgotten.
        assert!(load.end(10, false, Millis(2000)) && load.end(20, false, Millis(2000)));
        assert_eq!((load.pages, load.moved), (0, begun));
        load.pages += 20;
        assert!(load.end(10, true, Millis(3000)), "more is under way");
        assert!(!load.takes_nothing(Millis(3499), hang_time) && load.takes_nothing(Millis(3500), hang_time));
        assert!(!load.end(10, true, Millis(4000)), "it is idle");
    }

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

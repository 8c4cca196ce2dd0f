//! Fill: pages into the cache, from the window to the completed folio.
//!
//! A window becomes gaps (what of it is not cached), gaps become runs of
//! consecutive frames, runs become locked folios in the tree and one [`Fill`]
//! each. Fewer frames than pages is not an error: a window is a wish.
//!
//! The end of a fill comes by [`FillSink`], on whatever thread reaped it. Pages
//! that the device did not deliver leave the tree before their folios are
//! unlocked, so a failed page is absent, never empty.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::arena::{Arena, Completed, Put, Run};
use crate::backend::{Fill, FillRun, FillSink, Reap, WaitRoom};
use crate::mapping::{Mapping, RUN_PAGES_MAX};
use crate::readahead::Window;
use crate::reclaim::Reclaim;
use crate::stats::{Count, Counters};
use crate::sync::Locks;
use crate::units::{Frame, Order, PAGE_SIZE, PageIndex};
use crate::xarray::Stop;

use super::read::Patience;

/// Pages reclaimed at a time, so that a window of evictions frees neighbouring frames together.
const RECLAIM_PAGES: u32 = 256;
/// How often memory is waited for before it is said that there is none.
const STALLS_MAX: u32 = 100;
/// How long, where there is nothing in flight to wait for.
const STALL: Duration = Duration::from_millis(1);

/// What the paths of one cache share.
#[derive(Debug)]
pub struct Filemap {
    pub(crate) arena: Arc<Arena>,
    pub(crate) room: Arc<WaitRoom>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) reclaim: Reclaim,
    /// The largest folio a fill makes.
    pub(crate) folio_order_max: Order,
    /// Fills submitted and not completed.
    in_flight: AtomicU64,
    /// Fills completed, so that one who waits for memory sees that something happened.
    completed: AtomicU64,
}

/// How much the caller needs the first missing page of a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Need {
    /// It was asked for, and the caller will wait for it: worth waiting for memory.
    Asked,
    /// It may come handy.
    Ahead,
}

/// What became of a wish to fill a window.
#[derive(Debug)]
pub(crate) enum Filled {
    /// Some of it is on its way, beginning with the first page that was not there.
    Submitted(Arc<Batch>),
    /// Every page of it is there, or on its way by somebody else.
    Nothing,
    /// No frame or no node could be had for its first missing page.
    NoMemory,
    /// A lock was held or the device's queue full, and the caller does not wait.
    Busy,
}

impl Filemap {
    /// The paths of a cache over `arena`.
    pub fn new(arena: Arc<Arena>, room: Arc<WaitRoom>, folio_order_max: Order) -> Self {
        let counters = Arc::new(Counters::default());
        Self {
            reclaim: Reclaim::new(Arc::clone(&arena), Arc::clone(&counters)),
            arena,
            room,
            counters,
            folio_order_max,
            in_flight: AtomicU64::new(0),
            completed: AtomicU64::new(0),
        }
    }

    /// Fills submitted and not yet completed.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Starts filling what of `window` is not cached. May wait for locks with [`Patience::Wait`], and for
    /// memory with [`Need::Asked`]; never for the window's own bytes.
    pub(crate) fn fill_window(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        window: Window,
        need: Need,
        patience: Patience,
    ) -> Filled {
        // 1 What is not there.
        let gaps = match mapping.lock_as(patience.locks()) {
            Some(guard) => gaps(&guard, window),
            None => return Filled::Busy,
        };
        if gaps.is_empty() {
            return Filled::Nothing;
        }
        if patience == Patience::Now && !mapping.backend().has_room(gaps.len()) {
            return Filled::Busy;
        }
        // 2 Frames for it.
        let runs = self.alloc_runs(mapping, &gaps, need, patience.locks());
        if runs.is_empty() {
            return Filled::NoMemory;
        }
        // 3 Into the tree, and 4 to the device, with invalidation held off from the one to the other.
        let held_off =
            patience.wait_or(|| mapping.hold_off_invalidation(), || mapping.try_hold_off_invalidation());
        let Some(held_off) = held_off else {
            self.free_runs(&runs);
            return Filled::Busy;
        };
        let Some((added, stop)) = self.insert(mapping, window, &runs, patience) else {
            self.free_runs(&runs);
            return Filled::Busy;
        };
        let outcome = if added.is_empty() {
            match stop {
                Stop::NoNode if patience != Patience::Wait || !self.make_nodes() => Filled::NoMemory,
                _ => Filled::Nothing,
            }
        } else {
            let batch = Arc::new(Batch::new(Arc::clone(self), Arc::clone(mapping)));
            self.submit(mapping, &batch, &added);
            Filled::Submitted(batch)
        };
        drop(held_off);
        outcome
    }

    /// Frames for each gap, in order, as long runs as can be had. Ends early when memory does.
    fn alloc_runs(
        &self,
        mapping: &Mapping,
        gaps: &[(PageIndex, u32)],
        need: Need,
        locks: Locks,
    ) -> Vec<(PageIndex, Run)> {
        let mut runs = Vec::with_capacity(gaps.len());
        for &(first, pages) in gaps {
            let mut done = 0;
            while done < pages {
                let wanted = (pages - done).min(RUN_PAGES_MAX);
                let need = if runs.is_empty() { need } else { Need::Ahead };
                let Some(run) = self.alloc_run(mapping, wanted, need, locks) else { return runs };
                runs.push((first.plus(u64::from(done)), run));
                done += run.pages;
            }
        }
        runs
    }

    /// A run of up to `pages` frames; reclaims if there is none. Waits for locks as `locks` says, and for
    /// fills in flight only if the read cannot go on without.
    fn alloc_run(&self, mapping: &Mapping, pages: u32, need: Need, locks: Locks) -> Option<Run> {
        let take = || match locks {
            Locks::Wait => self.arena.alloc_run(pages),
            Locks::Try => self.arena.try_alloc_run(pages),
        };
        let mut stalls = 0;
        loop {
            if let Some(run) = take() {
                return Some(run);
            }
            let completed = self.completed.load(Ordering::Relaxed);
            let reclaimed = self.reclaim.reclaim(RECLAIM_PAGES, locks) > 0;
            if locks == Locks::Try {
                return if reclaimed { take() } else { None };
            }
            if reclaimed {
                continue;
            }
            if need == Need::Ahead || stalls == STALLS_MAX {
                return None;
            }
            stalls += 1;
            self.wait_for_memory(mapping, completed);
        }
    }

    /// Nothing can be evicted: what is in flight may be, once it has landed. Waits for a fill to end after
    /// `completed` had, reaping what nobody else reaps; or a moment, if none is in flight: frames may be on
    /// their way between the arena and a tree.
    fn wait_for_memory(&self, mapping: &Mapping, completed: u64) {
        // It may be in flight at another backend than ours, which nobody waits at: then we do.
        let backend = self.reclaim.idle_backend().unwrap_or_else(|| Arc::clone(mapping.backend()));
        backend.reap(Reap::Ready, &mut || false);
        let landed = || self.completed.load(Ordering::Relaxed) != completed;
        if self.in_flight() == 0 && !landed() {
            std::thread::sleep(STALL);
        } else {
            self.room.wait(&*backend, &mut || landed() || self.in_flight() == 0);
        }
    }

    /// Puts runs into the tree under one hold of its lock: what of each run is in, until one is stopped by
    /// something other than a folio that came first. `None` if the lock is busy and the caller does not wait.
    fn insert(
        &self,
        mapping: &Mapping,
        window: Window,
        runs: &[(PageIndex, Run)],
        patience: Patience,
    ) -> Option<(Vec<(PageIndex, Run)>, Stop)> {
        let mut guard = mapping.lock_as(patience.locks())?;
        let mut inserted = Vec::with_capacity(runs.len());
        let mut left = Vec::new();
        let mut abandoned = false;
        let mut last_stop = Stop::All;
        let size_pages = mapping.size_pages();
        let order_max = self.folio_order_max.min(window.order);
        for &(index, run) in runs {
            // The file may have become shorter since the window was judged.
            let inside = size_pages.saturating_sub(index.0).min(u64::from(run.pages)) as u32;
            let tried = if last_stop == Stop::NoNode { 0 } else { inside };
            if tried > 0 {
                let piece = Run { frame: run.frame, pages: tried };
                let added = guard.add_folio_range(index, piece, order_max, window.marker);
                last_stop = added.stop;
                if added.pages > 0 {
                    inserted.push((index, Run { frame: run.frame, pages: added.pages }));
                }
                abandoned |= added.pages < tried;
            }
            if tried < run.pages {
                left.push((index, Run { frame: run.frame.plus(tried), pages: run.pages - tried }));
            }
        }
        drop(guard);
        if abandoned {
            self.room.wake(); // a reader may wait for a folio that will never be filled
        }
        self.free_runs(&left);
        Some((inserted, last_stop))
    }

    fn submit(&self, mapping: &Mapping, batch: &Arc<Batch>, runs: &[(PageIndex, Run)]) {
        let pages: u64 = runs.iter().map(|(_, run)| u64::from(run.pages)).sum();
        self.counters.add(Count::Inserted, pages);
        self.in_flight.fetch_add(runs.len() as u64, Ordering::Relaxed);
        let fills = runs.iter().map(|&(index, run)| {
            let run = FillRun { index, frame: run.frame, pages: run.pages };
            let bytes = self.arena.view().bytes(run.frame).expect("a run of ours exists");
            let buffer = NonNull::new(bytes).expect("no frame is at address 0");
            let sink = Arc::clone(batch) as Arc<dyn FillSink>;
            // SAFETY: the run's folios are locked by us, with a hold until `fill_completed`, so their
            // frames are this fill's alone; the batch keeps the arena alive.
            unsafe { Fill::new(run, buffer, sink) }
        });
        mapping.backend().submit(fills.collect());
    }

    fn free_runs(&self, runs: &[(PageIndex, Run)]) {
        for (_, run) in runs {
            self.arena.free_run(run.frame, run.pages);
        }
    }

    /// Evicts until a node can be had, scattered folios first, then whole extents; whether one can.
    fn make_nodes(&self) -> bool {
        for attempt in 0..8 {
            let scattered = attempt < 4;
            let freed = if scattered {
                self.reclaim.reclaim(RECLAIM_PAGES, Locks::Wait)
            } else {
                self.reclaim.reclaim_extent()
            };
            if let Some(cell) = self.arena.alloc_cell() {
                self.arena.free_cell(cell);
                return true;
            }
            if freed == 0 && !scattered {
                return false;
            }
        }
        false
    }
}

/// What of `window` no folio covers, as (first page, pages).
fn gaps(guard: &crate::mapping::MappingGuard<'_>, window: Window) -> Vec<(PageIndex, u32)> {
    let end = window.start.plus(u64::from(window.pages));
    let mut gaps = Vec::new();
    let mut from = window.start;
    while let Some((first, pages)) = guard.next_gap(from, end) {
        gaps.push((first, pages as u32));
        from = first.plus(pages);
    }
    gaps
}

/// The fills of one window, and what went wrong with them.
pub(crate) struct Batch {
    filemap: Arc<Filemap>,
    mapping: Arc<Mapping>,
    failures: Mutex<Vec<(FillRun, io::Error)>>,
}

impl Batch {
    fn new(filemap: Arc<Filemap>, mapping: Arc<Mapping>) -> Self {
        Self { filemap, mapping, failures: Mutex::default() }
    }

    /// The error that kept `index` from being filled, if there was one. Asked once.
    pub(crate) fn take_failure(&self, index: PageIndex) -> Option<io::Error> {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let covers = |run: &FillRun| index.0.wrapping_sub(run.index.0) < u64::from(run.pages);
        let place = failures.iter().position(|(run, _)| covers(run))?;
        Some(failures.swap_remove(place).1)
    }

    /// How many pages of the run hold the file's bytes: takes the rest out of the tree.
    fn settle(&self, run: FillRun, result: io::Result<usize>) -> u32 {
        let counters = &self.filemap.counters;
        counters.add(Count::DeviceReads, 1);
        let wanted = run.pages as usize * PAGE_SIZE;
        let failed = result.is_err();
        let bytes = match result {
            Ok(bytes) => bytes.min(wanted),
            Err(error) => {
                counters.add(Count::DeviceErrors, 1);
                self.failures.lock().unwrap_or_else(PoisonError::into_inner).push((run, error));
                0
            }
        };
        counters.add(Count::DeviceBytes, bytes as u64);
        let valid = bytes.div_ceil(PAGE_SIZE) as u32;
        if bytes < wanted {
            let mut guard = self.mapping.lock();
            // The file ends here: first its size, then the pages that may be looked at. But what a fill
            // found that was let go meanwhile says nothing of the file as it is now.
            if !failed && guard.holds_run(run) {
                self.mapping.shrink_size(run.index.first_byte() + bytes as u64);
            }
            guard.remove_failed(run, valid);
        }
        valid
    }
}

impl FillSink for Batch {
    fn fill_completed(&self, run: FillRun, result: io::Result<usize>) {
        let valid = self.settle(run, result);
        let view = self.filemap.arena.view();
        let mut free: Vec<(Frame, Order)> = Vec::new();
        let mut page = 0;
        while page < run.pages {
            let frame = run.frame.plus(page);
            let descriptor = view.own(frame);
            let order = descriptor.word().order();
            if let Completed::Detached(Put::Last(order)) = descriptor.complete(page < valid) {
                free.push((frame, order));
            }
            page += order.pages();
        }
        self.filemap.arena.free_all(&free);
        self.filemap.completed.fetch_add(1, Ordering::Relaxed);
        self.filemap.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.filemap.room.wake();
    }
}

impl std::fmt::Debug for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Batch").field("mapping", &self.mapping.id()).finish_non_exhaustive()
    }
}

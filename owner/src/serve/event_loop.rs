//! Event loop: the thread that does the housekeeping while others answer.
//!
//! ```text
//!   ten times a second   heartbeat + 1; up to when viewers may be sure; what each read and opened; slots to free
//!   twice a second       empty groups go; the owner is told what viewers did
//!   in between           waits at the socket, and for the ends of viewers (`listener.rs`)
//! ```
//!
//! It waits for no file system and for no viewer: calls that may hang are done in a queue.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{BEAT, Shared};
use crate::sys::death_notice::DeathNotice;
use crate::sys::serial_queues::QueueKey;
use crate::viewer::sys::{ticks, ticks_within};
use quinion::internals::arena::control::Counter;
use quinion::internals::sync::contained;

const WINDOW_BEATS: u32 = 5;

impl Shared {
    pub(super) fn run_event_loop(self: &Arc<Self>) {
        // Set when nothing is served any more, or by the kernel if this process is killed, before a lease ends.
        let arena = self.owner.arena();
        let ended = DeathNotice::new(arena.owner_lives());
        let mut beat = Instant::now();
        while !self.viewers.is_closed() {
            if beat <= Instant::now() {
                self.beat();
                beat = Instant::now() + BEAT;
            }
            self.listener.wait(beat, self);
        }
        drop(ended);
    }

    fn beat(self: &Arc<Self>) {
        let beats = self.viewers.control().heartbeat.fetch_add(1, Ordering::Relaxed);
        self.publish_lease_deadline();
        for viewer in self.viewers.present() {
            let mut viewer_slot = self.viewers.slot(viewer).lock();
            self.viewers.drain_ring_of(&mut viewer_slot, viewer);
            self.viewers.drain_opened_of(viewer);
            let late = viewer_slot.take_late_offers();
            let execs = self.viewers.page(viewer).counters[Counter::Execs as usize].load(Ordering::Relaxed);
            let replaced = viewer_slot.process_to_check(execs);
            drop(viewer_slot);
            drop(late);
            replaced.into_iter().for_each(|process| self.check_for_exec(viewer, process));
        }
        self.queues.retry();
        let overdue = std::mem::take(&mut *self.overdue.lock());
        overdue.into_iter().for_each(|viewer| self.free_soon(viewer));
        if beats.is_multiple_of(WINDOW_BEATS) {
            self.release_empty_groups();
        }
        // It may close files: one at a time.
        if beats.is_multiple_of(WINDOW_BEATS) && self.queues.waiting_in(QueueKey::Background) == 0 {
            let (owner, totals) = (Arc::clone(&self.owner), self.viewers.totals(|_| true));
            self.queues.spawn(QueueKey::Background, move || owner.window_ended(&totals));
        }
        // All of them wait for another process, perhaps for ever.
        if self.workers.are_all_busy() {
            let _ = self.start_worker();
        }
    }

    /// Publishes up to when viewers may be sure. The clock is read first: any delay shortens that time.
    pub(super) fn publish_lease_deadline(&self) {
        let from = ticks();
        let time = contained(|| self.owner.leases_valid_for()).unwrap_or(Duration::ZERO);
        // Release, partner: the Acquire in `Viewer::validation`.
        self.viewers
            .control()
            .leases_valid_until
            .store(from.saturating_add(ticks_within(time)), Ordering::Release);
    }
}

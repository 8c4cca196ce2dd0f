//! Keeper: the thread that does the housekeeping while others answer.
//!
//! ```text
//!   ten times a second   heartbeat + 1; up to when viewers may be sure; what each read and opened; seats to free
//!   twice a second       empty groups go; the owner is told what viewers did
//!   in between           waits at the socket, and for the ends of viewers (`listener.rs`)
//! ```
//!
//! It waits for no file system and for no viewer. What it does that may hang it has done in a queue.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::viewer_slot::ViewerSlot;
use super::{BEAT, Shared};
use crate::arena::control::{OPENED_ENTRIES, RING_ENTRIES};
use crate::sys::death_notice::DeathNotice;
use crate::sys::serial_queues::QueueKey;
use crate::units::Frame;
use crate::viewer::sys::{ticks, ticks_within};

/// Heartbeats of a window, after which the owner is told what viewers did.
const WINDOW_BEATS: u32 = 5;

impl Shared {
    /// The keeper's life.
    pub(super) fn run_keeper(self: &Arc<Self>) {
        // Said when we serve no more, or by the kernel if we are killed: before that lets go of a lease.
        let arena = self.owner.arena();
        let ended = DeathNotice::new(arena.owner_lives());
        let mut beat = Instant::now();
        while !self.is_closed() {
            if beat <= Instant::now() {
                self.beat();
                beat = Instant::now() + BEAT;
            }
            self.listener.wait(beat, self);
        }
        drop(ended);
    }

    /// Ten times a second.
    fn beat(self: &Arc<Self>) {
        let beats = self.control().heartbeat.fetch_add(1, Ordering::Relaxed);
        self.publish_lease_deadline();
        for viewer in self.present() {
            let mut seat = self.seat(viewer).lock();
            self.drain_ring_of(&mut seat, viewer);
            self.drain_opened_of(viewer);
            let late = seat.take_late_offers();
            drop(seat);
            drop(late);
        }
        self.queues.retry();
        let overdue = std::mem::take(&mut *self.overdue.lock());
        overdue.into_iter().for_each(|viewer| self.free_soon(viewer));
        if beats.is_multiple_of(WINDOW_BEATS) {
            self.release_empty_groups();
        }
        // It may close files; while the last one is at that there is no other.
        if beats.is_multiple_of(WINDOW_BEATS) && self.queues.waiting_in(QueueKey::Background) == 0 {
            let (owner, totals) = (Arc::clone(&self.owner), self.totals(|_| true));
            self.queues.spawn(QueueKey::Background, move || owner.window_ended(&totals));
        }
        // All of them wait for another process: perhaps for one that never answers.
        if self.workers.are_all_busy() {
            let _ = self.start_worker();
        }
    }

    /// Tells viewers up to when they may be sure. The clock is read first: whatever holds us up shortens that time, as
    /// does who says an older one a moment later.
    pub(super) fn publish_lease_deadline(&self) {
        let from = ticks();
        let time = catch_unwind(AssertUnwindSafe(|| self.owner.leases_valid_for())).unwrap_or(Duration::ZERO);
        // Release, partner: the Acquire in `Viewer::validation`.
        self.control().leases_valid_until.store(from.saturating_add(ticks_within(time)), Ordering::Release);
    }

    pub(super) fn drain_rings(&self) {
        self.present().for_each(|viewer| self.drain_ring(viewer));
    }

    /// Adds up which large files viewers opened.
    pub(super) fn drain_opened(&self) {
        self.present().for_each(|viewer| {
            let _seat = self.seat(viewer).lock(); // one at a time
            self.drain_opened_of(viewer);
        });
    }

    pub(super) fn drain_opened_of(&self, viewer: usize) {
        let page = self.page(viewer);
        let (head, tail) = (&page.opened_head, &page.opened_tail);
        let (head, tail) =
            (head.load(Ordering::Relaxed), tail.swap(head.load(Ordering::Relaxed), Ordering::Relaxed));
        let entries = head.wrapping_sub(tail).min(OPENED_ENTRIES as u32);
        for place in (0..entries).map(|back| head.wrapping_sub(back + 1) as usize % OPENED_ENTRIES) {
            self.control().count_opening(page.opened[place].load(Ordering::Relaxed));
        }
    }

    /// Tells the owner which frames a viewer read since it was last told.
    pub(super) fn drain_ring(&self, viewer: usize) {
        self.drain_ring_of(&mut self.seat(viewer).lock(), viewer);
    }

    pub(super) fn drain_ring_of(&self, seat: &mut ViewerSlot, viewer: usize) {
        let page = self.page(viewer);
        let head = page.ring_head.load(Ordering::Relaxed);
        let tail = std::mem::replace(&mut seat.tail, head);
        let entries = head.wrapping_sub(tail).min(RING_ENTRIES as u32);
        let arena = self.owner.arena();
        for place in (0..entries).map(|back| head.wrapping_sub(back + 1) as usize % RING_ENTRIES) {
            let frame = page.ring[place].load(Ordering::Relaxed);
            if arena.has_data(Frame(frame)) {
                let _ = catch_unwind(AssertUnwindSafe(|| self.owner.touched(Frame(frame))));
            }
        }
    }
}

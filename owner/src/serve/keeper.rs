//! Keeper: the thread that does the housekeeping while others answer.
//!
//! ```text
//!   ten times a second   heartbeat + 1; up to when viewers may be sure; what each read and opened; seats to free
//!   twice a second       empty groups go; the owner is told what viewers did
//!   in between           waits at the socket, and for the ends of viewers (`listener.rs`)
//! ```
//!
//! It waits for no file system and for no viewer: a queue does what may hang.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::viewer_slot::ViewerSlot;
use super::{BEAT, Shared};
use crate::sys::death_notice::DeathNotice;
use crate::sys::serial_queues::QueueKey;
use crate::viewer::sys::{ticks, ticks_within};
use quinion::internals::arena::control::{OPENED_ENTRIES, RING_ENTRIES};
use quinion::internals::units::Frame;

const WINDOW_BEATS: u32 = 5;

impl Shared {
    pub(super) fn run_keeper(self: &Arc<Self>) {
        // Set when nothing is served any more, or by the kernel if this process is killed, before a lease ends.
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
        // It may close files: one at a time.
        if beats.is_multiple_of(WINDOW_BEATS) && self.queues.waiting_in(QueueKey::Background) == 0 {
            let (owner, totals) = (Arc::clone(&self.owner), self.totals(|_| true));
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
        let time = catch_unwind(AssertUnwindSafe(|| self.owner.leases_valid_for())).unwrap_or(Duration::ZERO);
        // Release, partner: the Acquire in `Viewer::validation`.
        self.control().leases_valid_until.store(from.saturating_add(ticks_within(time)), Ordering::Release);
    }

    pub(super) fn drain_rings(&self) {
        self.present().for_each(|viewer| self.drain_ring(viewer));
    }

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

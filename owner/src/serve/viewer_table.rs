//! Viewer table: for each viewer its slot, its process and its page, and the numbers in the page.
//!
//! ```text
//!   viewer 0   slot (the owner's notes, a lock each)   process (0: free)   page (the viewer's own: trusted in nothing)
//!   viewer 1   ..
//! ```
//!
//! The table knows pages and slots. It takes no request and opens no file.
//!
//! Locks: each viewer slot has one, of the rank `Viewer`, and so have the runs: none is held while another is taken.
//! Under a slot's lock the rings of its page are read, and [`Owner::touched`] is called, which takes no lock.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::owner::Owner;
use super::peer_connection::PeerConnection;
use super::totals::ViewerTotals;
use super::viewer_slot::{Offer, ViewerSlot};
use super::viewer_slots::ViewerSlots;
use crate::viewer::sys::{Errno, futex_wake};
use quinion::internals::arena::control::{Control, OPENED_ENTRIES, RING_ENTRIES, ViewerPage};
use quinion::internals::sync::contained;
use quinion::internals::sync::{Rank, RankedMutex};
use quinion::internals::units::Frame;

const OFFERS_MAX: usize = 16;
pub(super) const NO_RUN: u64 = 0;

pub(super) struct ViewerTable {
    pub(super) owner: Arc<dyn Owner>,
    pub(super) slots: ViewerSlots,
    /// The process of each viewer slot, 0 for a free one.
    pub(super) processes: Vec<AtomicU32>,
    /// How many processes had each viewer slot.
    pub(super) joins: Vec<AtomicU32>,
    /// How many requests were taken of the processes that had each viewer slot.
    pub(super) taken_of: Vec<AtomicU32>,
    runs: RankedMutex<HashSet<u64>>,
    last_run: AtomicU64,
}

impl ViewerTable {
    pub(super) fn new(owner: Arc<dyn Owner>, viewers_max: usize) -> Self {
        let zeros = || (0..viewers_max).map(|_| AtomicU32::new(0)).collect();
        Self {
            owner,
            slots: ViewerSlots::new(viewers_max),
            processes: zeros(),
            joins: zeros(),
            taken_of: zeros(),
            runs: RankedMutex::new(Rank::Viewer, HashSet::new()),
            last_run: AtomicU64::new(0),
        }
    }

    /// Begins a run; returns its number, above 0.
    pub(super) fn begin_run(&self) -> u64 {
        let run = self.last_run.fetch_add(1, Ordering::Relaxed) + 1;
        self.runs.lock().insert(run);
        run
    }

    /// Ends a run: its sums are added to those of no run.
    pub(super) fn end_run(&self, run: u64) {
        self.runs.lock().remove(&run);
        for viewer_slot in self.slots.iter() {
            let mut viewer_slot = viewer_slot.lock();
            if let Some(past) = viewer_slot.past.remove(&run) {
                viewer_slot.past.entry(NO_RUN).or_default().merge(&past);
            }
        }
    }

    /// The run that the viewer says it counts for, if that has not ended.
    pub(super) fn run_of(&self, viewer: usize) -> u64 {
        let said = self.page(viewer).run.load(Ordering::Relaxed);
        if self.runs.lock().contains(&said) { said } else { NO_RUN }
    }

    pub(super) fn control(&self) -> &Control {
        self.owner.arena().control().control()
    }

    pub(super) fn page(&self, viewer: usize) -> &ViewerPage {
        self.owner.arena().control().viewer_page(viewer).expect("a viewer has a page")
    }

    pub(super) fn process(&self, viewer: usize) -> u32 {
        // Acquire, partner: the Release in `admit`: a thread that sees a process sees its page in place.
        self.processes[viewer].load(Ordering::Acquire)
    }

    pub(super) fn present(&self) -> impl Iterator<Item = usize> {
        self.present_among(0..self.slots.count())
    }

    pub(super) fn present_among(&self, among: Range<usize>) -> impl Iterator<Item = usize> {
        among.filter(|&viewer| self.process(viewer) != 0)
    }

    pub(super) fn slot(&self, viewer: usize) -> &RankedMutex<ViewerSlot> {
        self.slots.of(viewer).expect("a viewer has a slot")
    }

    pub(super) fn is_closed(&self) -> bool {
        self.control().closed.load(Ordering::SeqCst) != 0 // partner: `close`
    }

    pub(super) fn totals(&self, wanted: impl Fn(u64) -> bool) -> ViewerTotals {
        let mut totals = ViewerTotals::default();
        for (viewer, viewer_slot) in self.slots.iter().enumerate() {
            let viewer_slot = viewer_slot.lock();
            viewer_slot.past.iter().filter(|&(&run, _)| wanted(run)).for_each(|(_, past)| totals.merge(past));
            if self.process(viewer) != 0 && wanted(self.page(viewer).run.load(Ordering::Relaxed)) {
                totals.add(self.page(viewer));
            }
        }
        totals
    }

    pub(super) fn drain_rings(&self) {
        self.present().for_each(|viewer| self.drain_ring(viewer));
    }

    pub(super) fn drain_opened(&self) {
        self.present().for_each(|viewer| {
            let _viewer_slot = self.slot(viewer).lock(); // one at a time
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
        self.drain_ring_of(&mut self.slot(viewer).lock(), viewer);
    }

    pub(super) fn drain_ring_of(&self, viewer_slot: &mut ViewerSlot, viewer: usize) {
        let page = self.page(viewer);
        let head = page.ring_head.load(Ordering::Relaxed);
        let tail = std::mem::replace(&mut viewer_slot.tail, head);
        let entries = head.wrapping_sub(tail).min(RING_ENTRIES as u32);
        let arena = self.owner.arena();
        for place in (0..entries).map(|back| head.wrapping_sub(back + 1) as usize % RING_ENTRIES) {
            let frame = page.ring[place].load(Ordering::Relaxed);
            if arena.has_data(Frame(frame)) {
                contained(|| self.owner.touched(Frame(frame)));
            }
        }
    }

    pub(super) fn wake_waiters(&self) {
        for viewer in self.present() {
            for request in &self.page(viewer).requests {
                futex_wake(&request.state, u32::MAX >> 1);
            }
        }
    }

    /// Viewers may not rely on the owner before the kernel will report its death (`DeathNotice`).
    pub(super) fn wait_for_death_notice(&self) {
        // Acquire, partner: the store in `DeathNotice::new`.
        while self.owner.arena().owner_lives().load(Ordering::Acquire) == 0 && !self.is_closed() {
            std::thread::yield_now(); // the event loop, which was started, is about to say so
        }
    }

    /// Keeps a connection by which the viewer `number` has sent something; calls `reply` with the ticket or the error.
    pub(super) fn keep_offer(
        &self,
        number: u32,
        offer: Offer,
        reply: impl FnOnce(Result<u32, Errno>, &PeerConnection),
    ) {
        let named = self.present().filter(|&viewer| self.process(viewer) == number);
        let mut slots = named.map(|viewer| self.slot(viewer).lock());
        let is_its = |viewer_slot: &ViewerSlot| {
            viewer_slot.process.as_ref().is_some_and(|known| known.number == number)
                && !viewer_slot.is_replaced
        };
        let Some(mut viewer_slot) = slots.find(|viewer_slot| is_its(viewer_slot)) else {
            return reply(Err(Errno::ACCES), &offer.connection);
        };
        if viewer_slot.offers.len() >= OFFERS_MAX {
            drop(viewer_slot);
            return reply(Err(Errno::AGAIN), &offer.connection);
        }
        let ticket = viewer_slot.last_ticket.wrapping_add(1) & i32::MAX as u32;
        viewer_slot.last_ticket = ticket;
        reply(Ok(ticket), &offer.connection); // it does not wait
        viewer_slot.offers.insert(ticket, offer);
    }
}

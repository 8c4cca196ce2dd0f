//! Admission: a process gets a seat and a page, and the seat is free again when the process is no more.
//!
//! ```text
//!   process --of the domain? lives? no pins?--> the lowest free seat, a page, its end awaited --> viewer
//!                                                 '--none is free--> one more group, if the bound has room
//!   ended, or joined anew --no worker at work?--> its sums stay, its handles go --> free
//! ```
//!
//! A process that joins again is another program by now. A seat stays while a worker works for it.
//!
//! Invariants:
//!  1. A seat is said to be taken when its page is in place and the end of its process is awaited.
//!  2. The next viewer of a seat gets another page: what the one before still writes is not read.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::peer_connection::PeerConnection;
use super::viewer_slot::{Offer, Process, ViewerSlot, has_ended};
use super::{NO_RUN, Shared, spawn};
use crate::viewer::sys::Errno;
use quinion::internals::arena::control::GROUP_VIEWERS;
use quinion::internals::sys::peer::ProcessName;

/// Above so many viewers, what they opened is added up at the next beat, not at a join.
const VIEWERS_SUMMED_AT_JOIN: usize = 64;
const OFFERS_MAX: usize = 16;

impl Shared {
    pub(super) fn admit(self: &Arc<Self>, number: u32, alive: OwnedFd) -> Result<(usize, OwnedFd), Errno> {
        if self.is_closed() {
            return Err(Errno::SRCH);
        }
        let member = self.domain.member(number).map_err(|error| match error.raw_os_error() {
            // The owner is out of descriptors or memory.
            Some(error @ (libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => Errno(error),
            _ => Errno::ACCES,
        })?;
        // The number was that process's when it was checked: a descriptor of one that has ended is ready.
        if has_ended(&alive) {
            return Err(Errno::SRCH);
        }
        // What it had before it became another program is given back.
        for viewer in self.present().filter(|&viewer| self.process(viewer) == number) {
            let mut seat = self.seat(viewer).lock();
            if seat.has_pins_of(number) {
                return Err(Errno::BUSY); // it looks at what is pinned, by the view that it has
            }
            seat.is_replaced = seat.process.as_ref().is_some_and(|known| known.number == number);
            drop(seat);
            self.free_soon(viewer);
        }
        if self.present().nth(VIEWERS_SUMMED_AT_JOIN).is_none() {
            self.drain_opened();
        }
        let name = ProcessName::of(number, &alive);
        let process = Process { number, name, alive: Arc::new(alive), member: Arc::new(member) };
        let _groups = self.groups.lock();
        loop {
            let seats = self.seats.count();
            for viewer in (0..seats).filter(|&viewer| self.process(viewer) == 0) {
                let mut seat = self.seat(viewer).lock();
                if seat.process.is_some() {
                    continue; // another thread was faster
                }
                let page = self.owner.arena().make_viewer_page(viewer).map_err(|_| Errno(libc::ENOMEM))?;
                self.listener.await_end(viewer, &process.alive)?;
                seat.process = Some(process);
                self.joins[viewer].fetch_add(1, Ordering::Relaxed); // the next store orders it
                // Release, partner: the Acquire in `process`.
                self.processes[viewer].store(number, Ordering::Release);
                drop(seat);
                // A worker or watcher that sleeps for its group waits for its futex, too, from now on.
                self.announce_viewer(viewer);
                return Ok((viewer, page));
            }
            self.add_group(seats)?;
        }
    }

    /// Behind the first `seats`. The caller holds the lock of groups.
    ///
    /// # Errors
    /// There are as many as may be (EUSERS), the bound has no room for their pages (ENOBUFS), or the system refuses.
    fn add_group(self: &Arc<Self>, seats: usize) -> Result<(), Errno> {
        if seats >= self.processes.len() {
            return Err(Errno::USERS);
        }
        let group = seats / GROUP_VIEWERS;
        self.owner.reserve_viewers(group + 1).map_err(|_| Errno(libc::ENOBUFS))?;
        self.owner.arena().map_viewers(group).map_err(|_| Errno(libc::ENOMEM))?;
        if group > 0 && self.seats.is_unwatched(group) {
            let watch = move |shared: &Arc<Self>| shared.watch(group);
            let watcher =
                spawn(self, ("quinion-watcher", self.workers.ends()), watch).map_err(|_| Errno::AGAIN);
            self.workers.add_watcher(watcher.inspect_err(|_| self.seats.unwatch(group))?);
        }
        self.seats.add(group);
        Ok(())
    }

    /// If no viewer is in them. Waits for nothing: what cannot be given back now, a later call gives back.
    pub(super) fn release_empty_groups(&self) {
        let Some(_groups) = self.groups.try_lock() else { return };
        let groups = self.present().last().map_or(1, |viewer| viewer / GROUP_VIEWERS + 1);
        self.seats.truncate(groups);
        self.owner.arena().release_viewers(groups);
    }

    /// Keeps a connection by which the viewer `number` has sent something; calls `reply` with the ticket or the error.
    pub(super) fn keep_offer(
        &self,
        number: u32,
        offer: Offer,
        reply: impl FnOnce(Result<u32, Errno>, &PeerConnection),
    ) {
        let named = self.present().filter(|&viewer| self.process(viewer) == number);
        let mut seats = named.map(|viewer| self.seat(viewer).lock());
        let is_its = |seat: &ViewerSlot| {
            seat.process.as_ref().is_some_and(|known| known.number == number) && !seat.is_replaced
        };
        let Some(mut seat) = seats.find(|seat| is_its(seat)) else {
            return reply(Err(Errno::ACCES), &offer.connection);
        };
        if seat.offers.len() >= OFFERS_MAX {
            drop(seat);
            return reply(Err(Errno::AGAIN), &offer.connection);
        }
        let ticket = seat.last_ticket.wrapping_add(1) & i32::MAX as u32;
        seat.last_ticket = ticket;
        reply(Ok(ticket), &offer.connection); // it does not wait
        seat.offers.insert(ticket, offer);
    }

    pub(super) fn free_soon(&self, viewer: usize) {
        if !self.free_if_over(viewer) {
            self.overdue.lock().push(viewer);
        }
    }

    /// `false`: a worker works for it.
    pub(super) fn free_if_over(&self, viewer: usize) -> bool {
        // Before the seat's lock: a run that ends meanwhile leaves numbers that no viewer asks for.
        let said = self.page(viewer).run.load(Ordering::Relaxed);
        let run = if self.runs.lock().contains(&said) { said } else { NO_RUN };
        let mut seat = self.seat(viewer).lock();
        if !seat.is_over() {
            return true;
        }
        if seat.busy > 0 {
            return false; // it is waited for until a later beat
        }
        self.drain_ring_of(&mut seat, viewer);
        self.drain_opened_of(viewer);
        seat.past.entry(run).or_default().add(self.page(viewer));
        let past = std::mem::take(&mut seat.past);
        // The next in this seat gets another page: what this one still writes into its own is not read.
        let gone = std::mem::replace(&mut *seat, ViewerSlot { past, ..ViewerSlot::default() });
        self.processes[viewer].store(0, Ordering::Release); // partner: `process`
        drop(seat);
        gone.process.iter().for_each(|process| self.listener.forget_end(&process.alive));
        self.let_go_in_queues(gone.handles);
        true
    }
}

//! Admission: a process gets a viewer slot and a page, and the viewer slot is free again when the process is no more.
//!
//! ```text
//!   process --of the domain? lives? no pins?--> the lowest free viewer slot, a page, its end awaited --> viewer
//!                                                 '--none is free--> one more group, if the bound has room
//!   ended, or joined anew --no worker at work?--> its sums stay, its handles go --> free
//! ```
//!
//! A process that joins again is another program by now. A viewer slot stays while a worker works for it.
//!
//! Invariants:
//!  1. A viewer slot is said to be taken when its page is in place and the end of its process is awaited.
//!  2. The next viewer of a viewer slot gets another page: later stores of the one before are not read.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::viewer_slot::{Process, ViewerSlot, has_ended};
use super::{Shared, spawn};
use crate::viewer::sys::Errno;
use quinion::internals::arena::control::GROUP_VIEWERS;
use quinion::internals::sys::peer::ProcessName;

/// Above so many viewers, their openings are added up at the next beat, not at a join.
const VIEWERS_SUMMED_AT_JOIN: usize = 64;

impl Shared {
    pub(super) fn admit(self: &Arc<Self>, number: u32, alive: OwnedFd) -> Result<(usize, OwnedFd), Errno> {
        if self.viewers.is_closed() {
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
        let name = ProcessName::of(number, &alive);
        let process = Process { number, name, alive: Arc::new(alive), member: Arc::new(member) };
        let _groups = self.groups.lock(); // from here on, so that one process gets one slot
        // The process's handles and pins from before its `exec` are given back.
        for viewer in self.viewers.present().filter(|&viewer| self.viewers.process(viewer) == number) {
            let mut viewer_slot = self.viewers.slot(viewer).lock();
            if viewer_slot.has_pins_of(number) {
                return Err(Errno::BUSY); // it looks at what is pinned, by the view that it has
            }
            viewer_slot.is_replaced =
                viewer_slot.process.as_ref().is_some_and(|known| known.number == number);
            drop(viewer_slot);
            self.free_soon(viewer);
        }
        if self.viewers.present().nth(VIEWERS_SUMMED_AT_JOIN).is_none() {
            self.viewers.drain_opened();
        }
        loop {
            let slots = self.viewers.slots.count();
            for viewer in (0..slots).filter(|&viewer| self.viewers.process(viewer) == 0) {
                let mut viewer_slot = self.viewers.slot(viewer).lock();
                if viewer_slot.process.is_some() {
                    continue; // another thread was faster
                }
                let page = self.owner.arena().make_viewer_page(viewer).map_err(|_| Errno(libc::ENOMEM))?;
                self.listener.await_end(viewer, &process.alive)?;
                viewer_slot.process = Some(process);
                self.viewers.joins[viewer].fetch_add(1, Ordering::Relaxed); // the next store orders it
                // Release, partner: the Acquire in `process`.
                self.viewers.processes[viewer].store(number, Ordering::Release);
                drop(viewer_slot);
                // A worker or watcher that sleeps for its group waits for its futex, too, from now on.
                self.wakeups.announce_viewer(viewer, &self.workers);
                return Ok((viewer, page));
            }
            self.add_group(slots)?;
        }
    }

    /// Behind the first `slots`. The caller holds the lock of groups.
    ///
    /// # Errors
    /// There are as many as may be (EUSERS), the bound has no room for their pages (ENOBUFS), or the system refuses.
    fn add_group(self: &Arc<Self>, slots: usize) -> Result<(), Errno> {
        if slots >= self.viewers.processes.len() {
            return Err(Errno::USERS);
        }
        let group = slots / GROUP_VIEWERS;
        self.owner.reserve_viewers(group + 1).map_err(|_| Errno(libc::ENOBUFS))?;
        self.owner.arena().map_viewers(group).map_err(|_| Errno(libc::ENOMEM))?;
        if group > 0 && self.viewers.slots.is_unwatched(group) {
            let watch = move |shared: &Arc<Self>| shared.wakeups.watch(group);
            let watcher =
                spawn(self, "quinion-watcher", self.workers.ends(), watch).map_err(|_| Errno::AGAIN);
            self.workers.add_watcher(watcher.inspect_err(|_| self.viewers.slots.unwatch(group))?);
        }
        self.viewers.slots.add(group);
        Ok(())
    }

    /// If no viewer is in them. Waits for nothing: a slot that cannot be given back now is given back by a later call.
    pub(super) fn release_empty_groups(&self) {
        let Some(_groups) = self.groups.try_lock() else { return };
        let groups = self.viewers.present().last().map_or(1, |viewer| viewer / GROUP_VIEWERS + 1);
        self.viewers.slots.truncate(groups);
        self.owner.arena().release_viewers(groups);
    }

    pub(super) fn free_soon(&self, viewer: usize) {
        if !self.free_if_over(viewer) {
            self.overdue.lock().push(viewer);
        }
    }

    /// `false`: a worker works for it.
    pub(super) fn free_if_over(&self, viewer: usize) -> bool {
        // Before the viewer slot's lock: a run that ends meanwhile leaves numbers that no viewer asks for.
        let run = self.viewers.run_of(viewer);
        let mut viewer_slot = self.viewers.slot(viewer).lock();
        if !viewer_slot.is_over() {
            return true;
        }
        if viewer_slot.busy > 0 {
            return false; // it is waited for until a later beat
        }
        self.viewers.drain_ring_of(&mut viewer_slot, viewer);
        self.viewers.drain_opened_of(viewer);
        viewer_slot.past.entry(run).or_default().add(self.viewers.page(viewer));
        let past = std::mem::take(&mut viewer_slot.past);
        // The next in this viewer slot gets another page: later stores of this one into its own are not read.
        let gone = std::mem::replace(&mut *viewer_slot, ViewerSlot { past, ..ViewerSlot::default() });
        self.viewers.processes[viewer].store(0, Ordering::Release); // partner: `process`
        drop(viewer_slot);
        gone.process.iter().for_each(|process| self.listener.forget_end(&process.alive));
        self.handles.release_in_queues(gone.handles);
        true
    }
}

//! Viewer slots: the owner's notes of its viewers, group by group.
//!
//! ```text
//!   group 0   slots 0 .. 99      made with the first viewer     workers wait for their futexes
//!   group 1   slots 100 .. 199   made when no slot is free      its watcher does; an extent holds their pages
//!   ..                           up to as many as may view
//! ```
//!
//! The lowest free slot is taken, so that few groups are in use. Last groups without viewers are cut off and their
//! pages' memory given back; notes and watcher stay until the group is made again.
//!
//! Invariant: the groups that are made are the first ones, and each has its pages mapped and, but for the first, a
//! watcher. One thread at a time makes groups or cuts them off, by the lock of groups.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use super::viewer_slot::ViewerSlot;
use quinion::internals::arena::control::GROUP_VIEWERS;
use quinion::internals::sync::{Rank, RankedMutex};

#[derive(Debug)]
pub(super) struct ViewerSlots {
    groups: Box<[Group]>,
    count: AtomicUsize,
    most: usize,
}

#[derive(Debug, Default)]
struct Group {
    slots: OnceLock<Box<[RankedMutex<ViewerSlot>]>>,
    /// Changed when the threads that sleep for its viewers are to look again.
    joined: AtomicU32,
    has_watcher: AtomicBool,
}

impl ViewerSlots {
    pub(super) fn new(most: usize) -> Self {
        let groups = (0..most.div_ceil(GROUP_VIEWERS)).map(|_| Group::default()).collect();
        Self { groups, count: AtomicUsize::new(0), most }
    }

    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire) // partner: `add`
    }

    pub(super) fn of_group(&self, group: usize) -> Range<usize> {
        group * GROUP_VIEWERS..((group + 1) * GROUP_VIEWERS).min(self.most)
    }

    pub(super) fn first_group(&self) -> Range<usize> {
        0..self.count().min(GROUP_VIEWERS)
    }

    pub(super) fn of(&self, viewer: usize) -> Option<&RankedMutex<ViewerSlot>> {
        self.groups.get(viewer / GROUP_VIEWERS)?.slots.get()?.get(viewer % GROUP_VIEWERS)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &RankedMutex<ViewerSlot>> {
        self.groups.iter().filter_map(|group| group.slots.get()).flatten()
    }

    pub(super) fn add(&self, group: usize) {
        let viewer_slot = || RankedMutex::new(Rank::Viewer, ViewerSlot::default());
        let slots = self.of_group(group);
        self.groups[group].slots.get_or_init(|| slots.clone().map(|_| viewer_slot()).collect());
        // Release, partner: `count`.
        self.count.fetch_max(slots.end, Ordering::Release);
    }

    pub(super) fn truncate(&self, groups: usize) {
        // Relaxed is enough: a thread that still sees the viewer slots finds no viewer there.
        self.count.fetch_min(self.of_group(groups - 1).end, Ordering::Relaxed);
    }

    /// Wakes the workers for the first group, or another's watcher, when a viewer joins. In the owner's own memory:
    /// no viewer can sleep there, and be woken in their place.
    pub(super) fn joined(&self, viewer: usize) -> &AtomicU32 {
        &self.groups[viewer / GROUP_VIEWERS].joined
    }

    pub(super) fn all_joined(&self) -> impl Iterator<Item = &AtomicU32> {
        self.groups.iter().map(|group| &group.joined)
    }

    pub(super) fn is_unwatched(&self, group: usize) -> bool {
        !self.groups[group].has_watcher.swap(true, Ordering::Relaxed)
    }

    pub(super) fn unwatch(&self, group: usize) {
        self.groups[group].has_watcher.store(false, Ordering::Relaxed);
    }
}

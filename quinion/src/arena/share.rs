//! Share: the parts of an arena that others hold.
//!
//! An [`ArenaShare`] is for the owner's side of viewers. An [`OwnedView`] keeps the arena alive together with the view
//! that a hit walks through, and an [`OwnedRecord`] together with the record of a mapping.
//!
//! Invariant: none of them changes the arena.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use super::options::{ArenaError, ArenaStats};
use super::owner::Arena;
use crate::units::Frame;
use quinion_view::arena::control::ControlView;
use quinion_view::arena::{CellNumber, Record, View};

impl Arena {
    /// A view that keeps the arena: a handle looks through it, so that a hit makes no detour.
    pub fn owned_view(self: &Arc<Self>) -> OwnedView {
        // SAFETY: the arena, and with it its mapping, lives as long as the value that has both.
        OwnedView { view: unsafe { self.view.duplicate() }, arena: Arc::clone(self) }
    }
    /// The record in a cell of the caller's, found once for all questions to come, with a share of the arena.
    ///
    /// # Panics
    /// If the number is no cell's.
    pub fn owned_record(self: &Arc<Self>, cell: CellNumber) -> OwnedRecord {
        let record = NonNull::from(self.view.record(cell).expect("a cell of the caller's exists"));
        OwnedRecord { record, arena: Arc::clone(self) }
    }
    /// The part of it that is shared with viewers.
    pub fn share(&self) -> ArenaShare<'_> {
        ArenaShare(self)
    }
}

/// The part of an arena that is shared with viewers: nothing by which a frame could be freed or a folio changed.
#[derive(Clone, Copy, Debug)]
pub struct ArenaShare<'a>(pub(super) &'a Arena);

impl<'a> ArenaShare<'a> {
    /// See [`Arena::arena_fd`].
    pub fn arena_fd(self) -> BorrowedFd<'a> {
        self.0.arena_fd()
    }
    /// See [`Arena::control_fd`].
    pub fn control_fd(self) -> BorrowedFd<'a> {
        self.0.control_fd()
    }
    /// See [`Arena::control`].
    pub fn control(self) -> &'a ControlView {
        self.0.control()
    }
    /// See [`Arena::populate_control`].
    pub fn populate_control(self) -> Result<(), ArenaError> {
        self.0.populate_control()
    }
    /// See [`Arena::reserve_viewers`].
    pub fn reserve_viewers(self, groups: usize) -> Result<(), ArenaError> {
        self.0.reserve_viewers(groups)
    }
    /// See [`Arena::release_viewers`].
    pub fn release_viewers(self, groups: usize) {
        self.0.release_viewers(groups);
    }
    /// See [`Arena::map_viewers`].
    pub fn map_viewers(self, group: usize) -> Result<(), ArenaError> {
        self.0.map_viewers(group)
    }
    /// See [`Arena::make_viewer_page`].
    pub fn make_viewer_page(self, number: usize) -> Result<OwnedFd, ArenaError> {
        self.0.make_viewer_page(number)
    }
    /// See [`Arena::claim_service`].
    pub fn claim_service(self) -> bool {
        self.0.claim_service()
    }
    /// See [`Arena::token`].
    pub fn token(self) -> u64 {
        self.0.token()
    }
    /// See [`Arena::stats`].
    pub fn stats(self) -> ArenaStats {
        self.0.stats()
    }
    /// See [`Arena::check`].
    pub fn check(self) -> Result<(), String> {
        self.0.check()
    }
    /// See [`Header::owner_lives`](super::Header::owner_lives).
    pub fn owner_lives(self) -> &'a std::sync::atomic::AtomicU32 {
        &self.0.view().header().owner_lives
    }
    /// Whether `frame` exists and is no part of the tables.
    pub fn has_data(self, frame: Frame) -> bool {
        let view = self.0.view();
        (view.layout().frames_meta..view.frames_grown()).contains(&frame.0)
    }
}

/// A [`View`] together with a share of its arena.
#[derive(Debug)]
pub struct OwnedView {
    pub(super) view: View,
    pub(super) arena: Arc<Arena>,
}

impl OwnedView {
    /// The arena it keeps.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }
}

impl std::ops::Deref for OwnedView {
    type Target = View;
    #[inline]
    fn deref(&self) -> &View {
        &self.view
    }
}

/// A [`Record`] together with a share of its arena.
#[derive(Debug)]
pub struct OwnedRecord {
    record: NonNull<Record>,
    arena: Arc<Arena>,
}

// SAFETY: a record is atomics only, and its memory stays mapped as long as the arena, which is shared between threads.
unsafe impl Send for OwnedRecord {}
// SAFETY: as above.
unsafe impl Sync for OwnedRecord {}

impl OwnedRecord {
    /// The arena it keeps.
    #[inline]
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }
}

impl std::ops::Deref for OwnedRecord {
    type Target = Record;
    #[inline]
    fn deref(&self) -> &Record {
        // SAFETY: the record lies in the arena's mapping, which lives as long as this value has its share of the arena;
        // it is atomics only.
        unsafe { self.record.as_ref() }
    }
}

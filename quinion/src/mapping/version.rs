//! Version: whether the cache changed the file, or others did.
//!
//! Close-to-open compares the file's times with those known. A flush of the cache's own changes them, too, and would
//! look like a write of others. So the file is revalidated before the first of some flushes together, and after the
//! last. A **revalidation** is a stat that finds out whether the file has changed since its pages were cached; it is
//! called a look here, too:
//!
//! ```text
//!   known V0      idle           flushes under way        idle            known V0, or own V1
//!                   |look: V0?                 look: V1|
//!                   not V0: others were at it         this is own
//! ```
//!
//! | now the times are | it was |
//! |---|---|
//! | those known, or those after the cache's last flush | this cache alone |
//! | others, or others were seen before a flush | others: what is clean may be old |
//! | anything, while a flush is under way | undecidable, and treated as the cache's own; a later look sees it |
//!
//! A flush is under way in this sense until the look after it is over: between the two the times are the cache's, and
//! not known yet. And a look by others tells nothing if a flush fell into it ([`VersionProbe`]).
//!
//! Not an invariant: that a change by others is noticed that falls into the time of the cache's own flushes. Two who
//! write one file by two caches need more than times.
//!
//! A change in a time without a look counts as one by others ([`Mapping::note_unknown_change`]): a cut between the
//! last flush and the look after it, and a flush without a look before.
//!
//! A file system of a network may not answer for hours. So the look is the caller's, which chooses the thread to wait
//! ([`Mapping::revalidation_before_flush`], [`Mapping::revalidation_after_flush`]); until it is over, the state is as
//! above.
//!
//! Locks: its own, and below it that of the device's account. A look calls the file system, with no lock held.

use std::sync::{MutexGuard, PoisonError};

use crate::backend::{Attributes, Version};

use crate::sync::LockWait;
use crate::units::Millis;

use super::own_changes::ObservedVersion;
use super::owner::Mapping;

/// The state of the flushes before a look at the file's attributes.
#[derive(Clone, Copy, Debug)]
pub struct VersionProbe {
    /// How many flushes had begun; `None`: one was under way.
    flushes: Option<u64>,
}

fn times(version: Version) -> (i64, i64) {
    (version.modified, version.changed)
}

/// A revalidation that is due before flushes begin, and the state that it compares with.
#[derive(Clone, Copy, Debug)]
pub struct RevalidationBeforeFlush {
    known: Version,
    probe: VersionProbe,
}

/// The step before flushes that are to begin.
#[derive(Clone, Copy, Debug)]
pub enum DueBeforeFlush {
    /// A revalidation of the file is due.
    Revalidation(RevalidationBeforeFlush),
    /// No look: others of the file are under way, and it was looked at before the first.
    Nothing,
    /// A thread that cuts the file, or forgets pages of it, is not done: they do not begin before it is, and then not
    /// without a look.
    Busy,
}

/// A revalidation that is due after so many flushes, all of which have ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RevalidationAfterFlush {
    flushes: u64,
    /// When the last of them ended.
    pub ended: Millis,
}

impl Mapping {
    /// To be asked before flushes take pages from the tree: the revalidation that is due, if none of them is under way.
    /// The caller asks for the file's attributes, and says them by [`Mapping::end_revalidation_before`]. Busy only
    /// where `locks` forbids to wait.
    pub fn revalidation_before_flush(&self, locks: LockWait) -> DueBeforeFlush {
        let held_off = self.hold_off_invalidation_as(locks);
        let Some(known) = held_off.map(|version| *version) else { return DueBeforeFlush::Busy };
        let probe = self.begin_revalidation();
        match probe.flushes {
            Some(_) => DueBeforeFlush::Revalidation(RevalidationBeforeFlush { known, probe }),
            None => DueBeforeFlush::Nothing,
        }
    }

    /// The file is as in `before`, which was asked for after `due` was made; `None`: it cannot be had, and others may
    /// have changed the file.
    pub fn end_revalidation_before(&self, due: RevalidationBeforeFlush, before: Option<&Attributes>) {
        if !before.is_some_and(|before| self.is_as_known(due.known, due.probe, before)) {
            self.own_changes().is_changed_externally = true;
        }
    }

    /// To be asked when a flush has ended: the revalidation that is due, if it was the last. The caller asks for its
    /// attributes, and ends by [`Mapping::end_revalidation_after`].
    pub fn revalidation_after_flush(&self) -> Option<RevalidationAfterFlush> {
        let (flushes, ended) = self.writeback().flushes_to_revalidate_after()?;
        Some(RevalidationAfterFlush { flushes, ended })
    }

    /// The file is as in `after`, which was asked for after `due` was made; `None`: it cannot be had.
    pub fn end_revalidation_after(&self, due: RevalidationAfterFlush, after: Option<&Attributes>) {
        let mut own = self.own_changes();
        if self.writeback().not_revalidated() != Some(due.flushes) {
            return; // the end of another flush sees to it; or the file's pages were forgotten, with a later look
        }
        // If the file's attributes cannot be had, it counts as changed, and its clean pages go.
        if let Some(after) = after {
            own.after = Some(after.version);
        }
        self.writeback().note_revalidation(due.flushes);
    }

    /// Other processes may have changed the file, which no look will show: its clean pages go at the next look.
    pub fn note_unknown_change(&self) {
        self.own_changes().is_changed_externally = true;
    }

    /// The file's attributes are asked for next.
    pub fn begin_revalidation(&self) -> VersionProbe {
        VersionProbe { flushes: self.writeback().flushes_if_revalidated() }
    }

    /// Whether the file's size and times are as in `now`, asked for after `probe`, but for the cache's own writes to
    /// it; also where that cannot be told, because the cache was writing.
    pub fn is_as_in(&self, probe: VersionProbe, now: &Attributes) -> bool {
        self.is_as_known(self.version(), probe, now)
    }

    /// As [`Mapping::is_as_in`], for a caller that has the invalidate lock: `known` is the version under it.
    pub fn is_as_known(&self, known: Version, probe: VersionProbe, now: &Attributes) -> bool {
        let size = now.size_known();
        if self.writeback().writer().is_none() {
            return times(known) == times(now.version) && self.size() == size;
        }
        let seen = *self.own_changes();
        let is_known = times(known) == times(now.version);
        let is_own = seen.after.is_some_and(|after| times(after) == times(now.version));
        let is_as_left = (is_known || is_own) && self.writeback().size_on_device() == size;
        // Asked last: if nothing was under way until now, nothing of it has changed since the look began.
        let can_tell = probe.flushes.is_some() && probe.flushes == self.writeback().flushes_if_revalidated();
        !seen.is_changed_externally && (!can_tell || is_as_left)
    }

    /// Whether its known times were old enough, when they were read, that a later change has others.
    pub fn is_settled(&self) -> bool {
        let known = self.version();
        // A change by others that had begun when the cache's flush had ended would not be noticed anyway.
        known.settled && self.own_changes().after.is_none_or(|after| after.settled || after.steps)
    }

    /// The file was looked at, and its version is known anew. The caller has the invalidate lock alone. `ended`: how
    /// many flushes had begun, and all had ended, before that look; it serves them as the look after a flush does.
    pub fn reset_own_changes(&self, ended: Option<u64>) {
        let mut own = self.own_changes();
        *own = ObservedVersion::default();
        if let Some(flushes) = ended {
            self.writeback().note_revalidation(flushes);
        }
    }

    fn own_changes(&self) -> MutexGuard<'_, ObservedVersion> {
        self.writeback().own_changes.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

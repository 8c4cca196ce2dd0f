//! Version: whether it was we who changed the file, or others.
//!
//! Close-to-open compares the file's times with those known. A flush of our own changes them, too; without more, every
//! file that is written here would look as if others had written it. So the file is looked at before the first of some
//! flushes that are under way together, and after the last of them:
//!
//! ```text
//!   known V0      quiet          flushes under way        quiet           known V0, or ours V1
//!                   |look: V0?                 look: V1|
//!                   not V0: others were at it         this is ours
//! ```
//!
//! | now the times are | it was |
//! |---|---|
//! | those known, or those after our last flush | nobody but us |
//! | others, or others were seen before a flush of ours | others: what is clean may be old |
//! | anything, while a flush of ours is under way | not to be told, and taken for ours; who looks later sees it |
//!
//! Not an invariant: that a change by others is noticed that falls into the time of our own flushes. Two who write one
//! file by two caches need more than times.
//!
//! Locks: a leaf of its own. A look is a call of the file system, made with no lock held.

use std::sync::PoisonError;

use crate::backend::{Attributes, Version};
use crate::sync::lock::{Mutex, MutexGuard};

use super::owner::Mapping;

/// What is known of the file's times besides the version its folios were filled from.
#[derive(Debug, Default)]
pub(super) struct Ours(Mutex<Seen>);

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// After the last of our flushes.
    after: Option<Version>,
    /// Before one of ours the file was not as we knew it.
    is_strange: bool,
}

/// What of a version is compared.
fn times(version: Version) -> (i64, i64) {
    (version.modified, version.changed)
}

impl Mapping {
    /// Flushes are about to be handed to the writing backend, and take pages from the tree after this. Looks at the
    /// file if none is under way.
    pub fn look_before_flush(&self) {
        // Who forgets the file's pages looks at it himself, and is not waited for.
        let Some(known) = self.try_hold_off_invalidation().map(|version| *version) else { return };
        if let Some(before) = self.look_while_quiet()
            && !self.is_as_known(known, &before)
        {
            self.ours().is_strange = true;
        }
    }

    /// A flush has ended. Looks at the file if it was the last.
    pub fn look_after_flush(&self) {
        if let Some(after) = self.look_while_quiet() {
            self.ours().after = Some(after.version);
        }
    }

    /// The file as it is now, if no flush of ours was under way all the while.
    fn look_while_quiet(&self) -> Option<Attributes> {
        let quiet = || Some(self.device().flushes()).filter(|(begun, ended)| begun == ended);
        let before = quiet()?;
        // Who cannot say what the file is will be asked again.
        let attributes = self.writes_by()?.attributes().ok()?;
        (quiet() == Some(before)).then_some(attributes)
    }

    /// Whether the file's size and times are as in `now`, but for what we wrote to it ourselves; also where that cannot
    /// be told, because we are writing.
    pub fn is_as_in(&self, now: &Attributes) -> bool {
        self.is_as_known(self.version(), now)
    }

    /// As [`Mapping::is_as_in`], for who has the invalidate lock: `known` is the version under it.
    pub fn is_as_known(&self, known: Version, now: &Attributes) -> bool {
        if self.writes_by().is_none() {
            return times(known) == times(now.version) && self.size() == now.size;
        }
        let seen = *self.ours();
        let (begun, ended) = self.device().flushes();
        let is_known = times(known) == times(now.version);
        let is_ours = seen.after.is_some_and(|after| times(after) == times(now.version));
        !seen.is_strange && (begun != ended || ((is_known || is_ours) && self.size_on_device() == now.size))
    }

    /// Whether what is known of its times was old enough, when it was looked at, that a later change has others.
    pub fn is_settled(&self) -> bool {
        let known = self.version();
        // Of a change by others that had begun when our flush had ended we should not have heard anyway.
        known.settled && self.ours().after.is_none_or(|after| after.settled || after.steps)
    }

    /// The file was looked at, and its version is known anew. The caller has the invalidate lock alone.
    pub fn forget_ours(&self) {
        *self.ours() = Seen::default();
    }

    fn ours(&self) -> MutexGuard<'_, Seen> {
        self.ours.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

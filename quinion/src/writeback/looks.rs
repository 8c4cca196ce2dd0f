//! Looks: at a file's attributes before and after its flushes, by a thread that may wait for them.
//!
//! ```text
//!   before   a sync                    looks itself: it is the file's user
//!            the background, a need of memory, a throttled writer
//!                                      attributes at hand? looks itself
//!                                      else a thread of the device --look, the file's pass--> flushes
//!   after    a thread that ends flushes, of any file
//!                                      attributes at hand? looks itself
//!                                      else a thread of the device --look--> the syncs that wait for it
//! ```
//!
//! A file system of a network whose server is gone answers no look. The threads that serve all files ask it for
//! nothing ([`Backend::attributes_may_wait`]); those that do are some for each device, and hold nothing while they
//! wait: neither the cache's memory nor the mapping.
//!
//! A change by others between the last flush and the look after it would pass for the cache's own. So a sync
//! ends after that look, and a look that took longer than [`LOOK_MAX`] counts as not had.
//!
//! Invariants:
//!  1. Of a file one thread at a time looks before flushes in place of another.
//!  2. Each flush that is the last of some is followed by a look, by one that counts as not had, or by another flush.
//!  3. When [`Writeback::close`] has returned, no pass is begun here.
//!
//! Not an invariant: that a look ends. Its thread outlives the cache, and has the file's backend open.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::backend::{Attributes, Backend};
use crate::blocking_threads::{CallKind, CallQueue};
use crate::mapping::Mapping;
use crate::sync::contained;

use super::Writeback;

/// The longest time from the end of a flush to the end of the look after it.
const LOOK_MAX: Duration = Duration::from_secs(1);

/// The thread that looks at a file before a flush, where that may wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Looker {
    /// The caller: it is the file's user, or the last chance that its pages have.
    Caller,
    /// Another, which goes on with the file's pass then. The caller does nothing.
    Other,
    /// The caller has looked just now.
    Done,
}

/// Whether flushes may begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LookedBefore {
    Now,
    /// Another thread looks, and begins them.
    Elsewhere,
}

/// The place of the one thread that looks before flushes of a file. Dropping this gives it back.
struct LookTurn {
    mapping: Weak<Mapping>,
    writeback: Weak<Writeback>,
}

impl LookTurn {
    fn take(writeback: &Writeback, mapping: &Arc<Mapping>) -> Option<Self> {
        mapping.writeback().begin_look_elsewhere().then(|| {
            writeback.looks.pending.fetch_add(1, Ordering::Relaxed);
            Self { mapping: Arc::downgrade(mapping), writeback: Weak::clone(&writeback.me) }
        })
    }

    /// Looks, and keeps neither the cache nor the mapping meanwhile. Returns them, if there still are any.
    fn look(&self, writer: Arc<dyn Backend>) -> Option<(Arc<Writeback>, Arc<Mapping>)> {
        // Asked for now: the call may have waited for its thread.
        let due = self.mapping.upgrade()?.look_before_flush();
        let before = due.and_then(|due| Some((due, attributes_of(&*writer)?)));
        drop(writer);
        let (writeback, mapping) = (self.writeback.upgrade()?, self.mapping.upgrade()?);
        if let Some((due, before)) = before {
            mapping.end_look_before(due, &before);
        }
        Some((writeback, mapping))
    }
}

impl Drop for LookTurn {
    fn drop(&mut self) {
        if let Some(mapping) = self.mapping.upgrade() {
            mapping.writeback().end_look_elsewhere();
        }
        if let Some(writeback) = self.writeback.upgrade() {
            writeback.looks.pending.fetch_sub(1, Ordering::Relaxed);
            writeback.looks.ended.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A backend is foreign code: one that panics says nothing.
fn attributes_of(writer: &dyn Backend) -> Option<Attributes> {
    contained(|| writer.attributes())?.ok()
}

impl Writeback {
    /// Looks at the file if a flush of it needs that. A thread that cannot get its attributes will be asked again.
    pub(super) fn look_before_flush(&self, mapping: &Arc<Mapping>, looker: Looker) -> LookedBefore {
        if looker == Looker::Done {
            return LookedBefore::Now;
        }
        let (Some(writer), Some(due)) = (mapping.writeback().writer(), mapping.look_before_flush()) else {
            return LookedBefore::Now;
        };
        if looker == Looker::Other && writer.attributes_may_wait() && self.look_elsewhere(mapping, writer) {
            return LookedBefore::Elsewhere;
        }
        if let Ok(before) = writer.attributes() {
            mapping.end_look_before(due, &before);
        }
        LookedBefore::Now
    }

    /// `false`: there is no thread, or the cache ends.
    fn look_elsewhere(&self, mapping: &Arc<Mapping>, writer: &Arc<dyn Backend>) -> bool {
        if !self.looks.is_closed.try_read().is_ok_and(|is_closed| !*is_closed) {
            return false;
        }
        let Some(turn) = LookTurn::take(self, mapping) else { return true };
        let writer = Arc::clone(writer);
        let call = move || {
            let Some((writeback, mapping)) = turn.look(writer) else { return };
            writeback.pass_elsewhere(&mapping);
            drop(turn);
            writeback.background.wake();
            writeback.wait_queue.wake();
        };
        self.looks.threads.run(looks_of(mapping), Box::new(call)).is_ok()
    }

    fn pass_elsewhere(&self, mapping: &Arc<Mapping>) {
        let is_closed = self.looks.is_closed.read().unwrap_or_else(PoisonError::into_inner);
        if !*is_closed {
            contained(|| self.run_pass_after(mapping, Looker::Done));
        }
    }

    /// No pass goes on elsewhere from here on. Waits for those that are at it, and for no look.
    pub(super) fn close_looks(&self) {
        *self.looks.is_closed.write().unwrap_or_else(PoisonError::into_inner) = true;
    }

    /// A flush has ended, and the caller wakes the wait queue after this. Looks at the file, if it was the last.
    pub(super) fn look_after_flush(&self, mapping: &Arc<Mapping>) {
        let (Some(writer), Some(due)) = (mapping.writeback().writer(), mapping.look_after_flush()) else {
            return;
        };
        if !writer.attributes_may_wait() {
            return mapping.end_look_after(due, attributes_of(&**writer).as_ref());
        }
        let (asked, of, writer) = (Instant::now(), Arc::downgrade(mapping), Arc::clone(writer));
        let wait_queue = Arc::clone(&self.wait_queue);
        let call = move || {
            let is_due = |mapping: Arc<Mapping>| mapping.look_after_flush() == Some(due);
            if !of.upgrade().is_some_and(is_due) {
                return;
            }
            let after = attributes_of(&*writer).filter(|_| asked.elapsed() <= LOOK_MAX);
            drop(writer);
            if let Some(mapping) = of.upgrade() {
                mapping.end_look_after(due, after.as_ref());
            }
            wait_queue.wake();
        };
        if self.looks.threads.run(looks_of(mapping), Box::new(call)).is_err() {
            mapping.end_look_after(due, None);
        }
    }

    /// Waits until the file was looked at after the flushes that have ended, unless others are under way or follow.
    pub(super) fn wait_for_look(&self, mapping: &Mapping, writer: &dyn Backend) {
        let state = mapping.writeback();
        if let Some(flushes) = state.not_looked_at() {
            self.wait_queue.wait(writer, &mut || state.is_look_over(flushes));
        }
    }

    /// Flushes, and looks before some, that a thread which needs memory may wait for; and how many have ended.
    pub fn under_way(&self) -> (u64, u64) {
        let (in_flight, completed) = self.flushes();
        let looks = &self.looks;
        let (pending, ended) = (looks.pending.load(Ordering::Relaxed), looks.ended.load(Ordering::Relaxed));
        (in_flight + pending, completed + ended)
    }
}

fn looks_of(mapping: &Mapping) -> CallQueue {
    CallQueue { device: mapping.identity().shared_device(), kind: CallKind::Read }
}

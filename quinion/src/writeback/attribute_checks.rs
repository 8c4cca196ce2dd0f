//! Attribute checks: a file is revalidated before and after its flushes, by a thread that may wait for that.
//!
//! A revalidation, called a look here, is a stat that finds out whether the file has changed since its pages were
//! cached.
//!
//! ```text
//!   before   a sync                    looks itself: it is the file's user
//!            the background, a need of memory, a throttled writer
//!                                      attributes at hand? looks itself
//!                                      else a thread of the device --look, the file's pass--> flushes
//!   after    a thread that ends flushes, of any file
//!                                      attributes at hand? looks itself
//!                                      else another thread of the device
//!            a sync                    looks itself, if that is due
//! ```
//!
//! A file system of a network whose server is gone answers no look. The threads that serve all files ask it for
//! nothing ([`Backend::attributes_may_wait`]); those that do are some for each device, others before flushes than
//! after, so that no look after waits for one before.
//!
//! A change by others between the last flush and the look after it would pass for the cache's own. So a sync
//! ends after that look, and a look that was over later than [`AttributeChecks::max`] after the flush counts as not
//! had.
//!
//! **A file that is not looked at after its flushes** loses its cached clean pages, at the next look at it: an open, a
//! read at its end, `revalidate`. They are read again. Dirty pages stay. Pages that were written and not synced are
//! clean as well: if a sync fails later, it counts them among those that it cannot write again, as if they had been
//! evicted. There is no other way: what others did between the flush and now has times like the flush's own. So it is
//! with more than [`AFTER_MAX`] files of a device, which are more than would be looked at in time.
//!
//! A thread that needs memory waits for looks before flushes, since pages can go after them: for no longer than a
//! writer is held up, and for those of a device that hangs only until it has ended none for so long. Later needs find
//! no reason to wait in them, nor in that device's dirty pages, until one of them has ended.
//!
//! Invariants:
//!  1. Of a file one thread at a time looks before flushes in place of another.
//!  2. Each flush that is the last of some is followed by a look, by one that counts as not had, or by another flush.
//!  3. When [`Writeback::close`] has returned, no pass is begun here.
//!  4. Of a device no more than [`BEFORE_MAX`] looks before flushes are queued, and [`AFTER_MAX`] after. Files beyond
//!     the first come later; those beyond the second are not looked at.
//!
//! Not an invariant: that a look ends. It outlives the cache, and it, or its place in the queue, keeps the file's
//! backend open; but neither the cache's memory nor the mapping.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::Duration;

use crate::backend::{Attributes, Backend};
use crate::blocking_threads::{BlockingThreads, CallKind, CallQueue};
use crate::mapping::{DueBeforeFlush, Mapping, RevalidationAfterFlush};
use crate::sync::{LockWait, contained};
use crate::units::Millis;

use super::Writeback;
use super::stuck::device_of;

/// Looks before flushes of one device that are queued or under way.
const BEFORE_MAX: usize = 64;
/// Looks after flushes that are queued or under way: more than its threads make in a second.
const AFTER_MAX: usize = 4096;
/// The longest time from the end of a flush to the end of the look after it, in milliseconds.
const MAX: u64 = 1000;

/// The revalidations of one cache.
pub(super) struct AttributeChecks {
    /// Threads of the looks' own, so that no call of a future, which may wait for write-back, stands before a look.
    before: BlockingThreads,
    after: BlockingThreads,
    /// Looks before flushes that another thread makes, or is to make, by device.
    devices: Mutex<BTreeMap<u64, PendingChecks>>,
    /// How many of these looks have ended.
    ended: AtomicU64,
    /// Held while a pass goes on after such a look.
    is_closed: RwLock<bool>,
    /// The most milliseconds from a flush's end to the end of a look that still counts.
    max: AtomicU64,
}

impl AttributeChecks {
    pub(super) fn new() -> Self {
        let [ended, max] = [0, MAX].map(AtomicU64::new);
        let [before, after] = [(); 2].map(|()| BlockingThreads::default());
        Self { before, after, devices: Mutex::default(), ended, is_closed: RwLock::new(false), max }
    }

    fn devices(&self) -> MutexGuard<'_, BTreeMap<u64, PendingChecks>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin_pending(&self, device: u64, now: Millis) {
        let first = PendingChecks { count: 0, moved: now };
        self.devices().entry(device).or_insert(first).count += 1;
    }

    fn end_pending(&self, device: u64, now: Millis) {
        let mut devices = self.devices();
        let pending = devices.get_mut(&device).expect("a look that ends was pending");
        *pending = PendingChecks { count: pending.count - 1, moved: now };
        if pending.count == 0 {
            devices.remove(&device);
        }
        self.ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// The revalidations before flushes of one device that are queued or under way.
#[derive(Clone, Copy, Debug)]
struct PendingChecks {
    count: u64,
    /// When one has ended last, or the first of these was wanted.
    moved: Millis,
}

impl PendingChecks {
    /// Whether the device has ended none for as long as `hang_time`.
    fn hangs(self, now: Millis, hang_time: Duration) -> bool {
        u128::from(now.0.saturating_sub(self.moved.0)) >= hang_time.as_millis()
    }
}

/// The thread that revalidates a file before a flush, where that may wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CheckedBy {
    /// The caller: it is the file's user, or the last chance that its pages have.
    Caller,
    /// Another, which goes on with the file's pass then. The caller does nothing.
    Other,
    /// The caller has looked just now.
    Done,
    /// The times stay unknown: the next look takes them for another process's change, and drops the clean pages.
    NoThread,
}

/// Whether flushes may begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PreFlushCheck {
    Now,
    /// Another thread looks, and begins them; or the caller asks again later: a thread cuts the file.
    Elsewhere,
}

/// The place of the one thread that looks before flushes of a file. Dropping this gives it back.
struct CheckSlot {
    device: u64,
    mapping: Weak<Mapping>,
    writeback: Weak<Writeback>,
}

impl CheckSlot {
    fn take(writeback: &Writeback, mapping: &Arc<Mapping>) -> Option<Self> {
        mapping.writeback().begin_revalidation_elsewhere().then(|| {
            let device = queue_of(mapping).device;
            writeback.attribute_checks.begin_pending(device, writeback.now());
            Self { device, mapping: Arc::downgrade(mapping), writeback: Weak::clone(&writeback.me) }
        })
    }

    /// Looks, and keeps neither the cache nor the mapping meanwhile. Returns them, if there still are any.
    fn revalidate(&self, writer: Arc<dyn Backend>) -> Option<(Arc<Writeback>, Arc<Mapping>)> {
        // Asked for now: the call may have waited for its thread.
        let due = self.mapping.upgrade()?.revalidation_before_flush(LockWait::Try); // ends here: the stat may hang
        let before = match due {
            DueBeforeFlush::Revalidation(due) => Some((due, attributes_of(&*writer))),
            DueBeforeFlush::Nothing => None,
            DueBeforeFlush::Busy => return None, // a later round comes again
        };
        drop(writer);
        let (writeback, mapping) = (self.writeback.upgrade()?, self.mapping.upgrade()?);
        if let Some((due, before)) = before {
            mapping.end_revalidation_before(due, before.as_ref());
        }
        Some((writeback, mapping))
    }
}

impl Drop for CheckSlot {
    fn drop(&mut self) {
        if let Some(mapping) = self.mapping.upgrade() {
            mapping.writeback().end_revalidation_elsewhere();
        }
        if let Some(writeback) = self.writeback.upgrade() {
            writeback.attribute_checks.end_pending(self.device, writeback.now());
            writeback.wait_queue.wake();
        }
    }
}

/// A backend is foreign code: one that panics says nothing.
fn attributes_of(writer: &dyn Backend) -> Option<Attributes> {
    contained(|| writer.attributes())?.ok()
}

impl Writeback {
    /// Revalidates the file if a flush of it needs that; a thread that cuts it is waited for, if `locks` says so.
    pub(super) fn revalidate_before_flush(
        &self,
        mapping: &Arc<Mapping>,
        checked_by: CheckedBy,
        locks: LockWait,
    ) -> PreFlushCheck {
        match checked_by {
            CheckedBy::Done => return PreFlushCheck::Now,
            CheckedBy::NoThread => {
                mapping.note_unknown_change();
                return PreFlushCheck::Now;
            }
            CheckedBy::Caller | CheckedBy::Other => {}
        }
        let Some(writer) = mapping.writeback().writer() else { return PreFlushCheck::Now };
        // Once another flush has begun, a look after the last one that is late would be forgotten, and with it that
        // others may have changed the file since.
        let is_late = |due: &RevalidationAfterFlush| writer.attributes_may_wait() && !self.is_in_time(*due);
        if let Some(late) = mapping.revalidation_after_flush().filter(is_late) {
            mapping.end_revalidation_after(late, None);
        }
        let due = match mapping.revalidation_before_flush(locks) {
            DueBeforeFlush::Revalidation(due) => due,
            DueBeforeFlush::Nothing => return PreFlushCheck::Now,
            DueBeforeFlush::Busy => return PreFlushCheck::Elsewhere,
        };
        if checked_by == CheckedBy::Other && writer.attributes_may_wait() {
            self.revalidate_elsewhere(mapping, writer);
            return PreFlushCheck::Elsewhere;
        }
        mapping.end_revalidation_before(due, writer.attributes().ok().as_ref());
        PreFlushCheck::Now
    }

    /// Does nothing if the cache ends, which writes its files then; if many looks of the device are queued; or if there
    /// is no thread: a later round comes again.
    fn revalidate_elsewhere(&self, mapping: &Arc<Mapping>, writer: &Arc<dyn Backend>) {
        let (checks, queue) = (&self.attribute_checks, queue_of(mapping));
        let is_open = checks.is_closed.try_read().is_ok_and(|is_closed| !*is_closed);
        // Several threads that ask at once may exceed it by one each.
        if !is_open || checks.before.outstanding(queue) >= BEFORE_MAX {
            return;
        }
        let Some(turn) = CheckSlot::take(self, mapping) else { return };
        let writer = Arc::clone(writer);
        let call = move || {
            let writeback = Weak::clone(&turn.writeback);
            if let Some((writeback, mapping)) = turn.revalidate(writer) {
                writeback.pass_elsewhere(&mapping);
            }
            drop(turn);
            if let Some(writeback) = writeback.upgrade() {
                writeback.background.wake(); // for files beyond the bound, too
            }
        };
        let _later = checks.before.run(queue, Box::new(call));
    }

    fn pass_elsewhere(&self, mapping: &Arc<Mapping>) {
        let is_closed = self.attribute_checks.is_closed.read().unwrap_or_else(PoisonError::into_inner);
        if !*is_closed {
            contained(|| self.run_pass_after(mapping, CheckedBy::Done));
        }
    }

    /// No pass goes on elsewhere from here on. Waits for those that are at it, and for no look.
    pub(super) fn close_revalidations(&self) {
        *self.attribute_checks.is_closed.write().unwrap_or_else(PoisonError::into_inner) = true;
    }

    /// A flush has ended, and the caller wakes the wait queue after this. Looks at the file, if it was the last.
    pub(super) fn revalidate_after_flush(&self, mapping: &Arc<Mapping>) {
        let (Some(writer), Some(due)) = (mapping.writeback().writer(), mapping.revalidation_after_flush())
        else {
            return;
        };
        if !writer.attributes_may_wait() {
            return mapping.end_revalidation_after(due, attributes_of(&**writer).as_ref());
        }
        let (checks, queue) = (&self.attribute_checks, queue_of(mapping));
        if checks.after.outstanding(queue) >= AFTER_MAX {
            return mapping.end_revalidation_after(due, None);
        }
        let (of, me, writer) = (Arc::downgrade(mapping), Weak::clone(&self.me), Arc::clone(writer));
        let call = move || {
            // Not kept during the look.
            let is_due = |mapping: Arc<Mapping>| mapping.revalidation_after_flush() == Some(due);
            let is_wanted = of.upgrade().is_some_and(is_due);
            let is_in_time = me.upgrade().is_some_and(|writeback| writeback.is_in_time(due));
            let after = if is_wanted && is_in_time { attributes_of(&*writer) } else { None };
            drop(writer);
            if is_wanted && let (Some(writeback), Some(mapping)) = (me.upgrade(), of.upgrade()) {
                writeback.end_revalidation_after(&mapping, due, after);
            }
        };
        if checks.after.run(queue, Box::new(call)).is_err() {
            mapping.end_revalidation_after(due, None);
        }
    }

    fn is_in_time(&self, due: RevalidationAfterFlush) -> bool {
        self.now().0.saturating_sub(due.ended.0) < self.attribute_checks.max.load(Ordering::Relaxed)
    }

    /// One that comes late may have seen what others did meanwhile.
    fn end_revalidation_after(
        &self,
        mapping: &Mapping,
        due: RevalidationAfterFlush,
        after: Option<Attributes>,
    ) {
        mapping.end_revalidation_after(due, after.filter(|_| self.is_in_time(due)).as_ref());
    }

    /// For a sync, whose thread is the file's user: looks at the file after the flushes that have ended, if that is
    /// due, and waits for none of the threads that look for others. No look is due then, or other flushes have begun.
    pub(super) fn revalidate_after_sync(&self, mapping: &Mapping, writer: &dyn Backend) {
        if let Some(due) = mapping.revalidation_after_flush() {
            let after = if self.is_in_time(due) { attributes_of(writer) } else { None };
            self.end_revalidation_after(mapping, due, after);
        }
    }

    /// A look after a flush counts if it was over before so much time since that had passed: a second, if not set.
    pub fn set_revalidation_max(&self, time: Duration) {
        let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        self.attribute_checks.max.store(millis, Ordering::Relaxed);
    }

    /// Revalidations before flushes that other threads make, or are to make.
    pub fn revalidations_before(&self) -> u64 {
        self.attribute_checks.devices().values().map(|pending| pending.count).sum()
    }

    /// Whether a thread that needs memory may wait for looks before flushes, as long as a writer is held up at most.
    /// Not for those of a device that has ended none for so long: each hang is waited for once, and not by each need.
    pub fn revalidations_may_end(&self) -> bool {
        let (now, hang_time) = (self.now(), self.options.wait_max);
        self.attribute_checks.devices().values().any(|pending| !pending.hangs(now, hang_time))
    }

    /// Devices of which looks before flushes are wanted, and none has ended for so long.
    pub(super) fn devices_with_hung_revalidations(&self, hang_time: Duration) -> BTreeSet<u64> {
        let (now, devices) = (self.now(), self.attribute_checks.devices());
        let hung = devices.iter().filter(|(_, pending)| pending.hangs(now, hang_time));
        hung.map(|(&device, _)| device).collect()
    }

    /// Whether some file has pages that are dirty or under way, and its device is not one that has taken no page, or
    /// ended no look, for as long as a writer is held up at most.
    pub fn pages_may_be_written(&self) -> bool {
        let hung = self.devices_that_take_nothing(self.options.wait_max);
        let is_dirty = |mapping: &Mapping| mapping.writeback().dirty_pages().total() > 0;
        let may_be_written = |mapping: &Mapping| is_dirty(mapping) && !hung.contains(&device_of(mapping));
        self.totals.total() > 0 && self.files().iter().any(|mapping| may_be_written(mapping))
    }

    /// Flushes that a thread which needs memory may wait for, without a bound, and how many have ended; with the looks
    /// before flushes that have ended, which are a progress. One that is under way may never end: see
    /// [`Writeback::revalidations_may_end`].
    pub fn under_way(&self) -> (u64, u64) {
        let (in_flight, completed) = self.flushes();
        (in_flight, completed + self.attribute_checks.ended.load(Ordering::Relaxed))
    }
}

fn queue_of(mapping: &Mapping) -> CallQueue {
    CallQueue { device: mapping.identity().shared_device(), kind: CallKind::Read }
}

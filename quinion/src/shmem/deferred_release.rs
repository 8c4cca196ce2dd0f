//! Deferred release: memory files that are gone while folios of them are on their way to the spill file.
//!
//! ```text
//!   last handle dropped    none under way: the mapping is dropped with it, and its memory is free at once
//!                          else: remembered here, and the background thread is woken
//!   background thread      fetches completions of the spill file's device, after 1, 2, 4 .. 64 ms, until the last
//!                          such mapping is gone
//! ```
//!
//! A folio that is being written keeps its mapping, and so the memory of all of the file, until its request has ended.
//! A device whose completions must be fetched ends it in a thread that waits for that device. Threads that want memory
//! do, and so do readers of spilled pages; but after the last memory file there may be neither.
//!
//! The thread that drops the handle does not wait itself: the device may be stuck, and a drop should not be. The
//! background thread does not wait for the device either, because its other tasks wait behind this one.
//!
//! Invariants:
//!  1. A mapping that is alive behind its last handle is in the list, until it is not alive. (Its folios leave by
//!     threads that have a reference to it, and no thread gets one by its number any more.)
//!  2. No lock is held while completions are fetched.
//!
//! Cost: nothing where no memory file may spill; else, at the end of each, a look at a count.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::backend::ReapMode;
use crate::background::BackgroundTask;
use crate::filemap::Filemap;
use crate::mapping::Mapping;

/// From one look to the next at first.
const SOON: Duration = Duration::from_millis(1);
/// From one look to the next, when no file has gone for long.
const LATER: Duration = Duration::from_millis(64);

#[derive(Debug)]
pub(super) struct EndedFiles {
    filemap: Weak<Filemap>,
    list: Mutex<EndedList>,
}

#[derive(Debug)]
struct EndedList {
    files: Vec<Weak<Mapping>>,
    after: Duration,
}

impl EndedFiles {
    /// The list of `filemap`, whose background thread releases the files as long as the value lives.
    pub fn of(filemap: &Arc<Filemap>) -> Arc<Self> {
        let list = Mutex::new(EndedList { files: Vec::new(), after: SOON });
        let ended = Arc::new(Self { filemap: Arc::downgrade(filemap), list });
        let task: Weak<Self> = Arc::downgrade(&ended);
        filemap.supply.background.add(task);
        ended
    }

    /// The last handle of `mapping` goes; the caller has one reference to it.
    pub fn add(&self, filemap: &Filemap, mapping: &Arc<Mapping>) {
        // Other references were taken before it was removed from the table: each that is left is counted here.
        if mapping.backing().spills() && Arc::strong_count(mapping) > 1 {
            let mut list = self.list();
            list.files.push(Arc::downgrade(mapping));
            list.after = SOON;
            drop(list);
            filemap.supply.background.wake();
        }
    }

    fn list(&self) -> MutexGuard<'_, EndedList> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EndedList {
    /// After how long to look again; `None`: there is none left.
    fn prune(&mut self) -> Option<Duration> {
        let before = self.files.len();
        self.files.retain(|file| file.strong_count() > 0);
        self.after = if self.files.len() < before { SOON } else { (self.after * 2).min(LATER) };
        (!self.files.is_empty()).then_some(self.after)
    }
}

impl BackgroundTask for EndedFiles {
    fn run(&self) -> Option<Duration> {
        // Every wake-up comes by here, and most are others'.
        if self.list().files.is_empty() {
            return None;
        }
        let filemap = self.filemap.upgrade()?;
        let device = filemap.supply.spill.as_ref()?.backend();
        if device.wants_leader() {
            device.reap(ReapMode::Ready, &mut || false);
        }
        self.list().prune()
    }
}

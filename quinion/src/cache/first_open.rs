//! First open: the open that makes a file's mapping, and has that to itself until it has succeeded.
//!
//! After a mapping is made an open may fail still: the file is looked at, or cut to nothing. A thread that found the
//! mapping meanwhile would go on with the backend of an open that failed, which is its caller's again, who may free
//! what it needs. And an open that empties would cut what that thread had written, and made durable, to a file that it
//! had found empty. So the open that makes a mapping has a **turn**, which stands in the table of files: other opens of
//! the file wait for its end, and look again. One that fails has left nothing in the table, for the mapping has no
//! page.
//!
//! Invariants:
//!  1. A mapping whose file has no turn in the table is of an open that succeeded.
//!  2. A turn ends with its open, also with one that fails or panics, after its handle has ended.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::backend::Identity;

use super::CacheInner;

/// The files that are opened for the first time now.
#[derive(Debug, Default)]
pub(super) struct FirstOpens(HashMap<Identity, Arc<TurnEnd>>);

/// The end of a turn, to be waited for without the table's lock.
#[derive(Debug, Default)]
pub(super) struct TurnEnd {
    has_come: Mutex<bool>,
    comes: Condvar,
}

/// The turn of one open.
#[derive(Debug)]
pub(super) struct FirstOpen<'a> {
    cache: &'a CacheInner,
    identity: Identity,
    end: Arc<TurnEnd>,
}

impl FirstOpens {
    /// The end of the turn that another open has with that file.
    pub fn turn_with(&self, identity: &Identity) -> Option<Arc<TurnEnd>> {
        self.0.get(identity).map(Arc::clone)
    }

    /// Begins a turn. No other open has one with that file.
    pub fn begin<'a>(&mut self, cache: &'a CacheInner, identity: Identity) -> FirstOpen<'a> {
        let end = Arc::<TurnEnd>::default();
        self.0.insert(identity, Arc::clone(&end));
        FirstOpen { cache, identity, end }
    }
}

impl TurnEnd {
    /// Waits for a file system, as the open that has the turn does. To be called without a lock.
    pub fn wait(&self) {
        let mut has_come = self.has_come.lock().unwrap_or_else(PoisonError::into_inner);
        while !*has_come {
            has_come = self.comes.wait(has_come).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for FirstOpen<'_> {
    fn drop(&mut self) {
        self.cache.table.lock().first_opens.0.remove(&self.identity);
        *self.end.has_come.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.end.comes.notify_all();
    }
}

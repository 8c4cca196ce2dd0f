//! Shortage: which files are left to the kernel because memory is too small, and how much would hold them.
//!
//! ```text
//!   thrash.rs: they thrash ------------------> Refused      no viewer attaches it; those that have it detach it
//!   background_copy.rs: it does not fit -----> NotCopied    the kernel serves it until it is asked for again
//!   no file attached for IDLE_WINDOWS_MAX ---> all are forgotten
//! ```
//!
//! It has one lock, under which nothing else is called.

use std::collections::{BTreeMap, HashMap};

use super::thrash::{self, Candidate, Detector, WindowSums};
use quinion::internals::sync::{Rank, RankedMutex};
use quinion::internals::units::FileId;

/// Windows without an attach, five minutes, after which files are not refused any more.
const IDLE_WINDOWS_MAX: u32 = 600;

/// Files left to the kernel because memory is too small; all 0 if there were none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Shortage {
    /// Number of files that were left to the kernel.
    pub files: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Bytes of memory that would have held them beside those that were served.
    pub memory: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ShortageEntry {
    pub(super) id: FileId,
    pub(super) bytes: u64,
    pub(super) decision: Decision,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Decision {
    /// No viewer may attach it.
    Refused,
    /// The file does not fit beside the files that were copied: the kernel serves it until it is asked for again.
    NotCopied,
}

#[derive(Debug)]
pub(super) struct MemoryShortage {
    state: RankedMutex<State>,
}

#[derive(Debug, Default)]
struct State {
    detector: Detector,
    files: BTreeMap<FileId, ShortageEntry>,
    /// Bytes that would have held all files.
    memory: u64,
    idle_windows: u32,
}

impl State {
    const FILES_MAX: usize = 4096;

    /// If there are too many, one is forgotten, first one that was not refused: that is looked at again.
    fn insert(&mut self, entry: ShortageEntry) {
        if self.files.len() >= Self::FILES_MAX && !self.files.contains_key(&entry.id) {
            let noted = self.files.iter().find(|(_, file)| file.decision != Decision::Refused);
            let other = noted.or_else(|| self.files.first_key_value()).map(|(&other, _)| other);
            other.and_then(|other| self.files.remove(&other));
        }
        self.files.insert(entry.id, entry);
    }
}

impl MemoryShortage {
    pub(super) fn new() -> Self {
        Self { state: RankedMutex::new(Rank::Viewer, State::default()) }
    }

    pub(super) fn is_refused(&self, id: FileId) -> bool {
        self.state.lock().files.get(&id).is_some_and(|file| file.decision == Decision::Refused)
    }

    /// `attached`: all attached files. `memory_min`: the memory that this file needs by itself.
    pub(super) fn note(&self, entry: ShortageEntry, attached: &HashMap<FileId, Candidate>, memory_min: u64) {
        let mut state = self.state.lock();
        state.insert(entry);
        let others = attached.values().filter(|file| !state.files.contains_key(&file.id));
        let all = others.map(|file| file.bytes).chain(state.files.values().map(|file| file.bytes));
        let memory = thrash::memory_for(all.fold(0, u64::saturating_add));
        state.memory = state.memory.max(memory).max(memory_min);
    }

    pub(super) fn report(&self) -> Shortage {
        let state = self.state.lock();
        let bytes = state.files.values().fold(0_u64, |sum, file| sum.saturating_add(file.bytes));
        let files = state.files.len() as u64;
        Shortage { files, bytes, memory: if files > 0 { state.memory } else { 0 } }
    }

    /// A window has ended with these sums; whether memory is too small. `is_idle`: no file is attached.
    pub(super) fn window_ended(&self, sums: WindowSums, is_idle: bool) -> bool {
        let mut state = self.state.lock();
        state.idle_windows = if is_idle { state.idle_windows.saturating_add(1) } else { 0 };
        if state.idle_windows >= IDLE_WINDOWS_MAX {
            state.files.clear();
            state.memory = 0;
        }
        state.detector.is_too_small(sums)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_files_too_large_for_memory_is_bounded() {
        let mut state = State::default();
        let most = State::FILES_MAX as u64;
        for inode in 0..3 * most {
            let decision = if inode % 4 == 0 { Decision::Refused } else { Decision::NotCopied };
            state.insert(ShortageEntry { id: FileId { device: 1, inode }, bytes: 1, decision });
        }
        assert_eq!(state.files.len() as u64, most);
        let refused = state.files.values().filter(|file| file.decision == Decision::Refused).count() as u64;
        assert!(refused >= 3 * most / 4 - 1, "those that are refused stay: {refused}");
        for inode in 0..2 * most {
            let id = FileId { device: 2, inode };
            state.insert(ShortageEntry { id, bytes: 1, decision: Decision::Refused });
        }
        assert_eq!(state.files.len() as u64, most);
    }
}

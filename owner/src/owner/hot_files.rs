//! Hot files: which files viewers read, for a person that watches.
//!
//! ```text
//!   attach   (mapping, name) --> names: the last so many files that were attached
//!   fill, touched   mapping  --> counts[mapping % 1024] = (mapping, reads)
//! ```
//!
//! Hits are not counted, as they store nothing that is shared. Counted are viewers' requests for bytes, and folios
//! that they say they have read, which they stop saying of hot ones. So a number ranks files, and is no number of
//! reads. Counting takes no lock: [`Owner::touched`](crate::serve::Owner::touched) may not. Two files in one place
//! take it from each other, and both show less.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use quinion::internals::sync::{Rank, RankedMutex};
use quinion::internals::units::MappingId;

/// A file that viewers read.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HotFile {
    /// The file's path, as of the last time that a viewer attached it.
    pub name: PathBuf,
    /// How often the owner was asked about it: less than its reads, but enough to rank files by.
    pub requests: u64,
    /// The file's cached bytes, in whole pages; `None` if no viewer has it open any more.
    pub cached_bytes: Option<u64>,
}

#[derive(Debug)]
pub(super) struct AccessCounts {
    counts: Box<[AtomicU64]>,
    names: RankedMutex<VecDeque<(MappingId, PathBuf)>>,
}

const PLACES: usize = 1024;
const NAMES_MAX: usize = 64;

/// A file with the requests that were counted of it.
#[derive(Debug)]
pub(super) struct RankedFile {
    pub(super) id: MappingId,
    pub(super) name: PathBuf,
    pub(super) requests: u64,
}

impl AccessCounts {
    pub(super) fn new() -> Self {
        let counts = (0..PLACES).map(|_| AtomicU64::new(0)).collect();
        Self { counts, names: RankedMutex::new(Rank::Viewer, VecDeque::new()) }
    }

    pub(super) fn attached(&self, id: MappingId, name: PathBuf) {
        let mut names = self.names.lock();
        names.retain(|(known, _)| *known != id);
        names.truncate(NAMES_MAX - 1);
        names.push_front((id, name));
    }

    pub(super) fn add(&self, id: MappingId) {
        let place = &self.counts[id.0 as usize % PLACES];
        let (whose, requests) = parts(place.load(Ordering::Relaxed));
        let requests = if whose == id.0 { requests.saturating_add(1) } else { 1 };
        // If two threads store at a time, one count may be lost.
        place.store(u64::from(id.0) << 32 | u64::from(requests), Ordering::Relaxed);
    }

    pub(super) fn hottest(&self, most: usize) -> Vec<RankedFile> {
        let requests =
            |id: MappingId| match parts(self.counts[id.0 as usize % PLACES].load(Ordering::Relaxed)) {
                (whose, requests) if whose == id.0 => u64::from(requests),
                _ => 0,
            };
        let named = self.names.lock().clone();
        let ranked = |(id, name)| RankedFile { id, name, requests: requests(id) };
        let mut files: Vec<_> = named.into_iter().map(ranked).collect();
        files.sort_by_key(|file| std::cmp::Reverse(file.requests));
        files.truncate(most);
        files
    }
}

fn parts(count: u64) -> (u32, u32) {
    ((count >> 32) as u32, count as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(counts: &AccessCounts, most: usize) -> Vec<(String, u64)> {
        let hottest = counts.hottest(most).into_iter();
        hottest.map(|file| (file.name.display().to_string(), file.requests)).collect()
    }

    #[test]
    fn files_are_ranked_by_reported_reads_and_named_as_attached_last() {
        let counts = AccessCounts::new();
        for (id, name) in [(1, "one"), (2, "two"), (3, "three"), (1, "uno")] {
            counts.attached(MappingId(id), PathBuf::from(name));
        }
        [2, 1, 2].into_iter().for_each(|id| counts.add(MappingId(id)));
        assert_eq!(names(&counts, 2), [("two".to_owned(), 2), ("uno".to_owned(), 1)]);
        assert_eq!(names(&counts, 9).len(), 3);
    }

    #[test]
    fn a_file_that_takes_anothers_place_begins_anew_and_old_names_are_forgotten() {
        let counts = AccessCounts::new();
        counts.attached(MappingId(1), PathBuf::from("old"));
        counts.add(MappingId(1));
        counts.add(MappingId(1 + PLACES as u32));
        assert_eq!(names(&counts, 1), [("old".to_owned(), 0)]);
        for id in 2..2 + NAMES_MAX as u32 {
            counts.attached(MappingId(id), PathBuf::from("new"));
        }
        assert!(counts.hottest(PLACES).iter().all(|file| file.name.ends_with("new")));
    }
}

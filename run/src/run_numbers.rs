//! Run numbers: all that a report of a run is made of, and its words for reasons.
//!
//! ```text
//!   viewers' totals, the owner's numbers, the arena, files and how they were served --> RunReport
//!        RunReport --> run_report.rs: lines for people, or JSON
//!                  '-> run_notes.rs:  sentences on why nothing was served, or little
//! ```
//!
//! Nothing is written or asked for here.

use std::ffi::OsString;

use quinion::ReadaheadUse;
use quinion::internals::arena::ArenaStats;
use quinion::internals::arena::control::Reason;
use quinion_owner::Shortage;
use quinion_owner::internals::serve::{FileMode, ViewerTotals};

use crate::keep::Name;
use crate::planned::Planned;
use crate::{Intercept, Kind, RunEnd};

/// The owner's work for its viewers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OwnerNumbers {
    /// Requests to devices.
    pub device_reads: u64,
    /// Bytes of these.
    pub device_bytes: u64,
    /// Pages fetched before a read asked for them, by what became of them.
    pub readahead: ReadaheadUse,
    /// Pages evicted to make room.
    pub evicted_pages: u64,
    /// Pages that had been evicted and came back.
    pub refaulted_pages: u64,
    /// Pages among these that had not been away for long.
    pub activated_pages: u64,
    /// Windows with a page that had come back before.
    pub workingset_windows: u64,
    /// Files left to the kernel because memory is too small.
    pub shortage: Shortage,
}

impl OwnerNumbers {
    /// The numbers of `owner`.
    pub fn of(owner: &quinion_owner::CacheOwner) -> Self {
        let cache = owner.cache();
        let stats = cache.stats();
        Self {
            readahead: cache.readahead_use(),
            device_reads: stats.device_reads,
            device_bytes: stats.device_bytes,
            evicted_pages: stats.evicted_pages,
            refaulted_pages: stats.refaulted_pages,
            activated_pages: stats.activated_pages,
            workingset_windows: stats.workingset_windows,
            shortage: owner.shortage(),
        }
    }

    pub(super) fn fields(&mut self) -> Vec<(&'static str, &mut u64)> {
        vec![
            ("device_reads", &mut self.device_reads),
            ("device_bytes", &mut self.device_bytes),
            ("readahead_pages", &mut self.readahead.pages),
            ("readahead_used_pages", &mut self.readahead.used_pages),
            ("readahead_wasted_pages", &mut self.readahead.wasted_pages),
            ("readahead_unread_pages", &mut self.readahead.unread_pages),
            ("evicted_pages", &mut self.evicted_pages),
            ("refaulted_pages", &mut self.refaulted_pages),
            ("activated_pages", &mut self.activated_pages),
            ("workingset_windows", &mut self.workingset_windows),
            ("short_files", &mut self.shortage.files),
            ("short_bytes", &mut self.shortage.bytes),
            ("short_memory", &mut self.shortage.memory),
        ]
    }

    /// The increase since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let (mut now, mut before) = (*self, *before);
        for ((_, number), (_, before)) in now.fields().into_iter().zip(before.fields()) {
            *number = number.saturating_sub(*before);
        }
        now.shortage = self.shortage;
        now
    }
}

/// Further numbers of a run in a kept cache.
#[derive(Clone, Copy, Debug)]
pub struct KeptRunNumbers<'a> {
    /// The cache's name.
    pub name: &'a Name,
    /// Other runs that it served meanwhile.
    pub others: u64,
    /// The owner sent its numbers; else all are 0.
    pub is_known: bool,
    /// The cache has ended during the run.
    pub has_ended: bool,
}

/// How the calls of a run's programs reached the interposer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Interception {
    /// The requested mode.
    pub how: Intercept,
    /// The plan, or why there is none; `None` if none was requested.
    pub planned: Option<Result<Planned, String>>,
}

/// The contents of a report.
#[derive(Debug)]
pub struct RunReport<'a> {
    /// The program and its arguments.
    pub program: &'a [OsString],
    /// How it ended.
    pub ended: RunEnd,
    /// The program's kind, as found before its start.
    pub kind: &'a Kind,
    /// How calls reached the interposer.
    pub intercept: &'a Interception,
    /// Totals of the viewers.
    pub totals: ViewerTotals,
    /// The arena at the end.
    pub stats: ArenaStats,
    /// The owner's numbers.
    pub owner: OwnerNumbers,
    /// How it detected changes of files by others.
    pub modes: Vec<FileMode>,
    /// If the cache is one that stays.
    pub kept: Option<KeptRunNumbers<'a>>,
}

/// A number with its unit.
pub(crate) fn counted(number: u64, one: &str, more: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { more })
}

/// A reason in words that follow "descriptors left to it: 3". Files that were asked for and are too large have a
/// shortage, and a note of their own.
pub(crate) fn words(reason: Reason, shortage: &Shortage) -> &'static str {
    match reason {
        Reason::NotRegular => "not a regular file with content",
        Reason::Writable => "open for writing in the same process",
        Reason::Flags => "opened with special flags",
        Reason::Duplicated => "duplicated",
        Reason::Forked => "shared with a child",
        Reason::Mapped => "mapped",
        Reason::Passed => "passed to a call that uses the kernel's offset",
        Reason::Number => "above the highest descriptor that is served",
        Reason::Refused => "refused by the cache",
        Reason::NoOwner => "the cache's owner did not answer",
        Reason::Changed => "changed while open",
        Reason::Foreign => "opened before the program started, or received",
        Reason::Unguaranteed => "without a lease, or on a file system that is not served",
        Reason::Left if shortage.files == 0 => "read too few times to be copied yet",
        Reason::Left => "read too few times to be copied yet, or too large for --memory",
        Reason::Restricted => "where code of the program's own may use descriptors unseen",
        Reason::Domain => "after the process changed its credentials or name spaces",
        Reason::Watched => "since a process watches files (inotify, fanotify)",
        Reason::Limited => "since the process limits its addresses or locks its memory",
        Reason::Wrapped => "in programs where another object wraps the functions that are served",
    }
}

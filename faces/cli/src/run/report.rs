//! Report: what a run did, for people and for programs.
//!
//! The JSON form is one object on one line. Its keys stay; new ones may be added.
//!
//! ```text
//!   schema            1
//!   program           [strings] the program and its arguments
//!   status, signal    how it ended: one is a number, the other null
//!   processes         processes that viewed the cache
//!   served            {reads, hits, bytes, files}    hits: reads that did not ask the owner
//!   asked             {reads, questions}             reads that waited for the owner; times they asked
//!   device            {reads, bytes}                 what the owner read
//!   readahead         {pages, used_pages, wasted_pages, unread_pages, accuracy}
//!                     fetched before anybody asked; read; gone unread; still there unread; used of those that
//!                     were read or are gone, 0 to 1
//!   evicted           {pages, refaulted_pages, activated_pages, workingset_windows}
//!                     what left for want of memory; of it, what came back, and what came back soon;
//!                     windows with a page that had come back before
//!   memory            {bound_bytes, grown_bytes, huge_share}   share of the extents in 2 MiB pages, 0 to 1
//!   kernel            {reads, reasons: {name: descriptors}}    left to the kernel, and why
//!   notes             [strings]
//! ```

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;

use quinion::ReadaheadUse;
use quinion::arena::ArenaStats;
use quinion::arena::control::Reason;
use quinion::serve::ViewerTotals;

use super::{Ended, Kind};
use crate::report::{Form, Report, Value};
use crate::size;

/// What the owner did for its viewers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OwnerNumbers {
    /// Requests to where the files are.
    pub device_reads: u64,
    /// Bytes of these.
    pub device_bytes: u64,
    /// Pages fetched before anybody asked for them, by what became of them.
    pub readahead: ReadaheadUse,
    /// Pages evicted to make room.
    pub evicted_pages: u64,
    /// Pages that had been evicted and came back.
    pub refaulted_pages: u64,
    /// Of these, pages that had not been away for long.
    pub activated_pages: u64,
    /// Windows with a page that had come back before.
    pub workingset_windows: u64,
}

/// Everything a report is made of.
#[derive(Debug)]
pub struct RunReport<'a> {
    /// The program and its arguments.
    pub program: &'a [OsString],
    /// How it ended.
    pub ended: Ended,
    /// What was seen of the program before.
    pub kind: &'a Kind,
    /// What the viewers did.
    pub totals: ViewerTotals,
    /// The arena at the end.
    pub stats: ArenaStats,
    /// What the owner did.
    pub owner: OwnerNumbers,
}

impl RunReport<'_> {
    /// Writes the report to `file`, or to standard error.
    pub fn write(&self, form: Form, file: Option<&Path>) -> io::Result<()> {
        let text = match form {
            Form::Text => self.text(),
            Form::Json => self.json(),
        };
        match file {
            Some(path) => {
                File::create(path).and_then(|mut file| file.write_all(text.as_bytes())).map_err(|error| {
                    io::Error::new(
                        error.kind(),
                        format!(
                            "cannot write the report to {}: {error}; name a file that can be written",
                            path.display()
                        ),
                    )
                })
            }
            None => io::stderr().lock().write_all(text.as_bytes()),
        }
    }

    fn hits(&self) -> u64 {
        self.totals.reads.saturating_sub(self.totals.asked)
    }

    fn huge_share(&self) -> f64 {
        let extents = self.stats.extents_huge + self.stats.extents_small;
        if extents == 0 { 0.0 } else { self.stats.extents_huge as f64 / extents as f64 }
    }

    fn notes(&self) -> Vec<String> {
        let mut notes: Vec<String> = self.kind.note().into_iter().collect();
        if super::PRELOAD.is_empty() {
            notes.push(
                "nothing was served: programs are served on x86-64 Linux with the GNU C library only".into(),
            );
        } else if notes.is_empty()
            && self.totals.viewers == 0
            && !matches!(self.ended, Ended::Status(126 | 127))
        {
            notes.push(
                "nothing was served: the program did not attach; it may clear its environment, or run \
                 where ours is not seen"
                    .into(),
            );
        }
        notes
    }

    /// The report for people.
    pub fn text(&self) -> String {
        let (totals, mut text) = (&self.totals, String::new());
        let mut line = |name: &str, value: String| {
            writeln!(text, "quinion: {name:<10} {value}").expect("a string takes it")
        };
        line(
            "served",
            format!(
                "{} in {} reads of {} files, {} processes",
                size::shown(totals.bytes),
                totals.reads,
                totals.files,
                totals.viewers
            ),
        );
        line("hits", format!("{} of the reads; {} asked {} times", self.hits(), totals.asked, totals.misses));
        let owner = &self.owner;
        line("device", format!("{} in {} reads", size::shown(owner.device_bytes), owner.device_reads));
        line("readahead", readahead_text(&owner.readahead));
        line(
            "evicted",
            format!(
                "{} pages; {} came back, {} of them soon",
                owner.evicted_pages, owner.refaulted_pages, owner.activated_pages
            ),
        );
        line(
            "memory",
            format!(
                "{} of {}, {:.0} % in 2 MiB pages",
                size::shown(self.stats.grown_bytes),
                size::shown(self.stats.bound_bytes),
                100.0 * self.huge_share()
            ),
        );
        line("kernel", format!("{} reads{}", totals.kernel_reads, reasons_text(totals)));
        for note in self.notes() {
            line("note", note);
        }
        text
    }

    /// The report for programs.
    pub fn json(&self) -> String {
        let (totals, number) = (&self.totals, |number: i32| Value::Number(number as u64));
        let (status, signal) = match self.ended {
            Ended::Status(status) => (number(status), Value::Unknown),
            Ended::Signal(signal) => (Value::Unknown, number(signal)),
        };
        let program = self.program.iter().map(|word| word.to_string_lossy().into_owned());
        let mut report = Report::new();
        report
            .add("schema", "schema", Value::Number(1))
            .add("program", "program", words_of(program))
            .add("status", "status", status)
            .add("signal", "signal", signal)
            .add("processes", "processes", Value::Number(totals.viewers))
            .add("served", "served", self.served())
            .add("asked", "asked", numbers(&[("reads", totals.asked), ("questions", totals.misses)]))
            .add("device", "device", self.device())
            .add("readahead", "readahead", self.readahead())
            .add("evicted", "evicted", self.evicted())
            .add("memory", "memory", self.memory())
            .add("kernel", "kernel", self.kernel())
            .add("notes", "notes", words_of(self.notes().into_iter()));
        report.printed(Form::Json)
    }

    fn served(&self) -> Value {
        let totals = &self.totals;
        numbers(&[
            ("reads", totals.reads),
            ("hits", self.hits()),
            ("bytes", totals.bytes),
            ("files", totals.files),
        ])
    }

    fn device(&self) -> Value {
        numbers(&[("reads", self.owner.device_reads), ("bytes", self.owner.device_bytes)])
    }

    fn readahead(&self) -> Value {
        let usage = &self.owner.readahead;
        let mut readahead = Report::new();
        for (name, number) in usage.numbers() {
            readahead.add(name, name, Value::Number(number));
        }
        let (part, whole) = (usage.used_pages, usage.used_pages + usage.wasted_pages);
        readahead.add("accuracy", "accuracy", Value::Share { part, whole });
        Value::Group(readahead)
    }

    fn evicted(&self) -> Value {
        numbers(&[
            ("pages", self.owner.evicted_pages),
            ("refaulted_pages", self.owner.refaulted_pages),
            ("activated_pages", self.owner.activated_pages),
            ("workingset_windows", self.owner.workingset_windows),
        ])
    }

    fn memory(&self) -> Value {
        let stats = &self.stats;
        let (part, whole) = (stats.extents_huge, stats.extents_huge + stats.extents_small);
        let mut memory = Report::new();
        memory.add("bound_bytes", "bound", Value::Bytes(stats.bound_bytes));
        memory.add("grown_bytes", "grown", Value::Bytes(stats.grown_bytes));
        memory.add("huge_share", "in 2 MiB pages", Value::Share { part, whole });
        Value::Group(memory)
    }

    fn kernel(&self) -> Value {
        let mut reasons = Report::new();
        for (&reason, count) in Reason::ALL.iter().zip(self.totals.reasons) {
            reasons.add(key(reason), words(reason), Value::Number(count));
        }
        let mut kernel = Report::new();
        kernel.add("reads", "reads", Value::Number(self.totals.kernel_reads));
        kernel.add("reasons", "descriptors left to it", Value::Group(reasons));
        Value::Group(kernel)
    }
}

/// A group of plain numbers.
fn numbers(named: &[(&'static str, u64)]) -> Value {
    let mut group = Report::new();
    for &(name, number) in named {
        group.add(name, name, Value::Number(number));
    }
    Value::Group(group)
}

/// A list of words.
fn words_of(words: impl Iterator<Item = String>) -> Value {
    Value::List(words.map(Value::Text).collect())
}

fn readahead_text(usage: &ReadaheadUse) -> String {
    let accuracy = usage.accuracy().map_or("-".into(), |share| format!("{:.1} %", 100.0 * share));
    format!(
        "{} pages ahead; {} read, {} gone unread, {} waiting; accuracy {accuracy}",
        usage.pages, usage.used_pages, usage.wasted_pages, usage.unread_pages
    )
}

fn reasons_text(totals: &ViewerTotals) -> String {
    let named: Vec<String> = Reason::ALL
        .iter()
        .zip(totals.reasons)
        .filter(|&(_, count)| count > 0)
        .map(|(&reason, count)| format!("{count} {}", words(reason)))
        .collect();
    if named.is_empty() { String::new() } else { format!("; descriptors left to it: {}", named.join(", ")) }
}

/// A reason's name in the JSON form.
fn key(reason: Reason) -> &'static str {
    match reason {
        Reason::NotRegular => "not_regular",
        Reason::Writable => "writable",
        Reason::Flags => "flags",
        Reason::Duplicated => "duplicated",
        Reason::Forked => "forked",
        Reason::Mapped => "mapped",
        Reason::Passed => "passed",
        Reason::Number => "number",
        Reason::Refused => "refused",
        Reason::NoOwner => "no_owner",
        Reason::Changed => "changed",
        Reason::Foreign => "foreign",
        Reason::Locked => "locked",
        Reason::Left => "left",
    }
}

/// A reason in words that follow "descriptors left to it: 3".
fn words(reason: Reason) -> &'static str {
    match reason {
        Reason::NotRegular => "no regular file with content",
        Reason::Writable => "open for writing too",
        Reason::Flags => "opened with special flags",
        Reason::Duplicated => "duplicated",
        Reason::Forked => "shared with a child",
        Reason::Mapped => "mapped",
        Reason::Passed => "passed to a call that uses the kernel's offset",
        Reason::Number => "numbered too high",
        Reason::Refused => "refused by the cache",
        Reason::NoOwner => "without an owner",
        Reason::Changed => "changed while open",
        Reason::Foreign => "opened before us or inside the C library",
        Reason::Locked => "locked",
        Reason::Left => "served as well by the kernel, for a while",
    }
}

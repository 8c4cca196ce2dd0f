//! Report: what a run did, for people and for programs.
//!
//! The JSON form is one object on one line. Its keys stay; new ones may be added.
//!
//! ```text
//!   schema            1
//!   program           [strings] the program and its arguments
//!   status, signal    how it ended: one is a number, the other null
//!   processes         processes that viewed the cache
//!   served            {reads, hits, bytes, files}    hits: reads that did not ask the owner; files: opens that were
//!                     served, so a file that is opened twice counts twice
//!   asked             {reads, questions}             reads that waited for the owner; times they asked
//!   device            {reads, bytes}                 what the owner read
//!   readahead         {pages, used_pages, wasted_pages, unread_pages, accuracy}
//!                     fetched before a read asked; read; left unread; still there unread; used of those that
//!                     were read or have left, 0 to 1
//!   evicted           {pages, refaulted_pages, activated_pages, workingset_windows}
//!                     what left for want of memory; of it, what came back, and what came back soon;
//!                     windows with a page that had come back before
//!   memory            {bound_bytes, grown_bytes, huge_share}   share of the extents in 2 MiB pages, 0 to 1
//!   intercept         {mode, functions, left, patched, names_alone: {name: processes}}
//!                     how calls reach the interposer: the mode; functions of the C library that were to be patched,
//!                     and what had to be left; processes in which that was done, and in which not, and why
//!   kernel            {reads, reasons: {name: descriptors}}    left to the kernel, and why
//!   others            {lease, immutable, looked_at, kernel, files: [{path, mode, why}]}
//!                     files by how changes by other processes were last detected; of the first 1000
//!                       lease      any change would have broken the owner's lease first
//!                       immutable  it cannot change, or that was declared
//!                       looked_at  its times were checked before each read
//!                       kernel     none of these: the kernel read
//!   kept              {name, other_runs, ended}: the cache, how many other runs it served meanwhile, and whether it
//!                     ended during the run, and does not stay; or null
//!   notes             [strings]
//! ```

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use quinion::ReadaheadUse;
use quinion::internals::arena::Validation;
use quinion::internals::arena::control::{Patching, Reason};
use quinion_owner::Shortage;
use quinion_owner::internals::serve::ViewerTotals;
use rustix::fs::OFlags;

use super::modes::{MODES, mode_name};
use super::run_notes::notes_of;
use super::run_numbers::{KeptRunNumbers, RunReport, counted, words};
use super::{Intercept, RunEnd};
use crate::report::{Form, Report, Value};
use quinion_size as size;

/// The name that means standard output.
const STDOUT: &str = "-";

/// Checks whether a report can be written to `path`, as far as that is seen before the program starts: afterwards its
/// status must not be lost. A path that is no plain file is not touched until then.
pub fn can_be_written(path: &Path) -> io::Result<()> {
    if path == Path::new(STDOUT) {
        return Ok(());
    }
    if path.metadata().is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir()) {
        return Ok(());
    }
    let file = File::options().append(true).create(true).open(path);
    file.map(drop).map_err(|error| {
        let wrong = cannot_write(path, &error);
        io::Error::new(wrong.kind(), format!("{wrong}; the program was not started"))
    })
}

fn cannot_write(path: &Path, error: &io::Error) -> io::Error {
    let path = path.display();
    io::Error::new(
        error.kind(),
        format!("cannot write the report to {path}: {error}; name a file that can be written"),
    )
}

/// Writes all of `text` over the file at `path`. A pipe without a reader is an error, and is not waited for.
fn write_over(path: &Path, text: &str) -> io::Result<()> {
    let mut options = File::options();
    options.write(true).create(true).truncate(true);
    let opened = options.clone().custom_flags(libc::O_NONBLOCK).open(path);
    let mut file = opened.or_else(|error| match error.raw_os_error() {
        Some(libc::ENXIO) => Err(io::Error::other("it is a pipe without a reader")),
        // Another process has a lease on it and releases it now; perhaps the owner of this cache.
        Some(libc::EAGAIN) => options.open(path),
        _ => Err(error),
    })?;
    // There is a reader; it may take a while.
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
    file.write_all(text.as_bytes())
}

fn write_out(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}

impl RunReport<'_> {
    /// Writes the report to `file`, to standard output if that is `-`, or to standard error.
    pub fn write(&self, form: Form, file: Option<&Path>) -> io::Result<()> {
        let text = match form {
            Form::Text => self.text(),
            Form::Json => self.json(),
        };
        match file {
            Some(path) if path == Path::new(STDOUT) => {
                write_out(&text).map_err(|error| cannot_write(Path::new("standard output"), &error))
            }
            Some(path) => write_over(path, &text).map_err(|error| cannot_write(path, &error)),
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
        notes_of(self)
    }

    /// The report for people. Where nothing was served, it begins with the reason.
    pub fn text(&self) -> String {
        let (totals, mut text) = (&self.totals, String::new());
        let mut line = |name: &str, value: String| {
            writeln!(text, "quinion: {name:<10} {value}").expect("a string takes it")
        };
        let (mut first, mut last) = (self.notes(), Vec::new());
        if totals.bytes > 0 {
            std::mem::swap(&mut first, &mut last);
        }
        first.into_iter().for_each(|note| line("note", note));
        line("served", self.served_text());
        line("hits", self.hits_text());
        let owner = &self.owner;
        let reads = counted(owner.device_reads, "read", "reads");
        line("device", format!("{} in {reads}", size::shown(owner.device_bytes)));
        line("readahead", readahead_text(&owner.readahead));
        line(
            "evicted",
            format!(
                "{}; {} refaulted, {} of them within the working set",
                counted(owner.evicted_pages, "page", "pages"),
                owner.refaulted_pages,
                owner.activated_pages
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
        let reads = counted(totals.kernel_reads, "read", "reads");
        line("kernel", format!("{reads}{}", reasons_text(totals, &owner.shortage)));
        if !self.modes.is_empty() {
            line("coherence", self.others_text());
        }
        line("intercept", self.intercept_text());
        if let Some(KeptRunNumbers { name, has_ended, .. }) = self.kept {
            let kept = match has_ended {
                false => format!("as `{name}`, for the next run; `quinion stop {name}` ends it"),
                true => format!(
                    "no more: the cache `{name}` ended during the run; reads after that were the kernel's and are not \
                     counted"
                ),
            };
            line("kept", kept);
        }
        last.into_iter().for_each(|note| line("note", note));
        text
    }

    fn served_text(&self) -> String {
        let totals = &self.totals;
        format!(
            "{} in {} of {}, {}",
            size::shown(totals.bytes),
            counted(totals.reads, "read", "reads"),
            counted(totals.files, "open", "opens"),
            counted(totals.viewers, "process", "processes")
        )
    }

    fn hits_text(&self) -> String {
        let totals = &self.totals;
        format!(
            "{} of {}; {} waited for the cache ({})",
            self.hits(),
            counted(totals.reads, "read", "reads"),
            counted(totals.asked, "read", "reads"),
            counted(totals.misses, "request", "requests")
        )
    }

    fn files_by(&self, validation: Validation) -> u64 {
        self.modes.iter().filter(|mode| mode.validation == validation).count() as u64
    }

    fn others_text(&self) -> String {
        let [lease, immutable, checked, kernel] = MODES.map(|validation| self.files_by(validation));
        let mut text = format!("{} by lease", counted(lease, "file", "files"));
        let mut add = |count: u64, words: &str| {
            if count > 0 {
                write!(text, ", {count} {words}").expect("a string takes it");
            }
        };
        add(immutable, "that never change");
        add(checked, "checked before each read");
        add(kernel, "left to the kernel");
        if let Some(mode) = self.modes.iter().find(|mode| mode.validation == Validation::Kernel) {
            write!(text, " ({}: {})", mode.path.display(), mode.why).expect("a string takes it");
        }
        text
    }

    /// The report for programs.
    pub fn json(&self) -> String {
        let (totals, number) = (&self.totals, |number: i32| Value::Number(number as u64));
        let (status, signal) = match self.ended {
            RunEnd::Status(status) => (number(status), Value::Unknown),
            RunEnd::Signal(signal) => (Value::Unknown, number(signal)),
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
            .add("intercept", "intercept", self.intercept())
            .add("kernel", "kernel", self.kernel())
            .add("others", "coherence", self.others())
            .add("kept", "kept", self.kept())
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

    fn kept(&self) -> Value {
        let Some(kept) = &self.kept else { return Value::Unknown };
        let mut group = Report::new();
        group.add("name", "name", Value::Text(kept.name.to_string()));
        group.add("other_runs", "other runs", Value::Number(kept.others));
        group.add("ended", "ended during the run", Value::Truth(kept.has_ended));
        Value::Group(group)
    }

    /// Processes whose C library was not patched, by the outcome.
    fn names_alone(&self) -> impl Iterator<Item = (Patching, u64)> {
        Patching::ALL
            .into_iter()
            .zip(self.totals.patching)
            .filter(|&(outcome, _)| outcome != Patching::Patched)
    }

    fn intercept(&self) -> Value {
        let plan = self.intercept.planned.as_ref().and_then(|planned| planned.as_ref().ok());
        let left = plan.into_iter().flat_map(|plan| &plan.left).cloned();
        let mut names_alone = Report::new();
        for (outcome, processes) in self.names_alone() {
            let (key, words) = outcome_names(outcome);
            names_alone.add(key, words, Value::Number(processes));
        }
        let mut intercept = Report::new();
        intercept
            .add("mode", "mode", Value::Text(self.intercept.how.name().into()))
            .add("functions", "functions", Value::Number(plan.map_or(0, |plan| plan.functions)))
            .add("left", "left", words_of(left))
            .add("patched", "patched", Value::Number(self.totals.patching[Patching::Patched as usize]))
            .add("names_alone", "by names alone", Value::Group(names_alone));
        Value::Group(intercept)
    }

    fn intercept_text(&self) -> String {
        match &self.intercept.planned {
            Some(Ok(plan)) => {
                let patched = self.totals.patching[Patching::Patched as usize];
                let mut text = format!(
                    "{} of the C library patched in {patched} of {}",
                    counted(plan.functions, "function", "functions"),
                    counted(self.totals.viewers, "process", "processes")
                );
                for (outcome, processes) in self.names_alone().filter(|&(_, processes)| processes > 0) {
                    let _ = write!(
                        text,
                        "; by symbol interposition alone in {processes}: {}",
                        outcome_names(outcome).1
                    );
                }
                for left in &plan.left {
                    let _ = write!(text, "; left {left}");
                }
                text
            }
            Some(Err(why)) => format!("by symbol interposition alone: {why}"),
            None if self.intercept.how == Intercept::Off => "not at all, as asked".into(),
            None => "by symbol interposition alone, as asked".into(),
        }
    }

    fn kernel(&self) -> Value {
        let mut reasons = Report::new();
        for (&reason, count) in Reason::ALL.iter().zip(self.totals.reasons) {
            reasons.add(key(reason), words(reason, &self.owner.shortage), Value::Number(count));
        }
        let mut kernel = Report::new();
        kernel.add("reads", "reads", Value::Number(self.totals.kernel_reads));
        kernel.add("reasons", "descriptors left to it", Value::Group(reasons));
        Value::Group(kernel)
    }

    fn others(&self) -> Value {
        let mut others = Report::new();
        for validation in MODES {
            let name = mode_name(validation);
            others.add(name, name, Value::Number(self.files_by(validation)));
        }
        let files = self.modes.iter().map(|file| {
            let mut report = Report::new();
            report
                .add("path", "path", Value::Text(file.path.to_string_lossy().into_owned()))
                .add("mode", "mode", Value::Text(mode_name(file.validation).into()))
                .add("why", "why", Value::Text(file.why.clone()));
            Value::Group(report)
        });
        others.add("files", "files", Value::List(files.collect()));
        Value::Group(others)
    }
}

fn numbers(named: &[(&'static str, u64)]) -> Value {
    let mut group = Report::new();
    for &(name, number) in named {
        group.add(name, name, Value::Number(number));
    }
    Value::Group(group)
}

fn words_of(words: impl Iterator<Item = String>) -> Value {
    Value::List(words.map(Value::Text).collect())
}

fn readahead_text(usage: &ReadaheadUse) -> String {
    let accuracy = usage.accuracy().map_or("-".into(), |share| format!("{:.1} %", 100.0 * share));
    format!(
        "{} read ahead; {} used, {} left unused, {} cached and not used yet; accuracy {accuracy}",
        counted(usage.pages, "page", "pages"),
        usage.used_pages,
        usage.wasted_pages,
        usage.unread_pages
    )
}

fn reasons_text(totals: &ViewerTotals, shortage: &Shortage) -> String {
    let named: Vec<String> = Reason::ALL
        .iter()
        .zip(totals.reasons)
        .filter(|&(_, count)| count > 0)
        .map(|(&reason, count)| format!("{count} {}", words(reason, shortage)))
        .collect();
    if named.is_empty() { String::new() } else { format!("; descriptors left to it: {}", named.join(", ")) }
}

/// An outcome's name in the JSON form, and words that follow "by symbol interposition alone in 3:".
fn outcome_names(outcome: Patching) -> (&'static str, &'static str) {
    match outcome {
        Patching::Patched => ("patched", "patched"),
        Patching::NoPlan => ("no_plan", "without a plan"),
        Patching::OtherLibrary => ("other_library", "another C library than the planned one"),
        Patching::Interposed => ("interposed", "another object wraps what has to be patched"),
        Patching::Threads => ("threads", "had threads already"),
        Patching::TooFar => ("too_far", "the C library is mapped too far from the preload object"),
        Patching::Denied => ("denied", "the kernel lets no code be changed"),
    }
}

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
        Reason::Unguaranteed => "unguaranteed",
        Reason::Left => "left",
        Reason::Restricted => "restricted",
        Reason::Domain => "domain",
        Reason::Watched => "watched",
        Reason::Limited => "limited",
        Reason::Wrapped => "wrapped",
    }
}

#[cfg(test)]
mod tests;

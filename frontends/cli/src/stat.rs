//! Stat: size and identity of files, and how much of them the kernel caches.
//!
//! ```text
//!   size and identity     what makes it this file and this content
//!   read by               the mechanism that would fetch its pages from the device, and whether it goes
//!                         past the kernel's page cache
//!   kernel page cache     pages of it that the kernel keeps already
//! ```
//!
//! A command that has just started has an empty cache of its own, so there is nothing to say about that; a running
//! `quinion run` reports at its end. Nothing of the file is read, so asking does not change the answer.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use quinion::Cache;
use rustix::fs::{AtFlags, StatxFlags};

use crate::other_program::{AskedServer, ObjectVerb, is_url};
use crate::report::{Form, Report, Value};
use crate::size::Size;
use crate::{EXIT_FAILED, build_cache, complain};
use quinion_cli::output::{EXIT_BROKEN_PIPE, EXIT_NOT_UNDERSTOOD};
use quinion_cli::sys::{self, Residency};

/// Show the identity, size and version of files as a cache knows them, and how much of each the kernel's cache holds.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Print one line of JSON for each file.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: AskedServer,
    /// The files; also URLs of objects, such as s3://BUCKET/KEY.
    #[arg(required = true, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    files: Vec<PathBuf>,
}

pub fn main(arguments: Arguments) -> ExitCode {
    let words: &[&str] = if arguments.json { &["stat", "--json"] } else { &["stat"] };
    let objects = ObjectVerb { words, server: &arguments.server, memory: None };
    if let Err(wrong) = objects.check(&arguments.files) {
        complain(&wrong);
        return ExitCode::from(EXIT_NOT_UNDERSTOOD);
    }
    let cache = match build_cache(Some(Size::Bytes(quinion::Cache::MEMORY_MIN))) {
        Ok(cache) => cache,
        Err(error) => return complain(&error),
    };
    let form = if arguments.json { Form::Json } else { Form::Text };
    let mut code = ExitCode::SUCCESS;
    for path in &arguments.files {
        if is_url(path) {
            match objects.done_with(path) {
                Ok(()) => {}
                Err(ended) if ended == ExitCode::from(EXIT_BROKEN_PIPE) => return ended,
                Err(ended) => code = ended,
            }
            continue;
        }
        match stat(&cache, path) {
            Ok(report) => {
                if let Err(code) = crate::print(&report.printed(form)) {
                    return code;
                }
            }
            Err(wrong) => {
                eprintln!("quinion: {wrong}");
                code = ExitCode::from(EXIT_FAILED);
            }
        }
    }
    code
}

fn stat(cache: &Cache, path: &Path) -> Result<Report, String> {
    let file = cache.open(path).map_err(|error| error.to_string())?;
    let named = |error: io::Error| format!("{}: {error}", path.display());
    // Opened a second time only to ask the kernel; if it is a pipe by now, this does not block.
    let plain = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(named)?;
    let metadata = plain.metadata().map_err(named)?;

    let mut report = Report::new();
    report.add("file", "file", Value::Text(path.display().to_string()));
    report.add("size_bytes", "size", Value::Bytes(file.len()));
    report.add("pages", "pages", Value::Number(pages(file.len())));
    report.add("identity", "identity", Value::Group(identity(&metadata)));
    report.add("read_by", "read by", Value::Group(mechanism(&file, &plain)));
    let kept = sys::residency(&plain, file.len()).ok();
    report.add("kernel_page_cache", "kernel page cache", Value::Group(kernel(kept, pages(file.len()))));
    Ok(report)
}

fn pages(bytes: u64) -> u64 {
    bytes.div_ceil(4096)
}

fn identity(metadata: &fs::Metadata) -> Report {
    let device = format!("{}:{}", rustix::fs::major(metadata.dev()), rustix::fs::minor(metadata.dev()));
    let mut report = Report::new();
    report.add("device", "device", Value::Text(device));
    report.add("inode", "inode", Value::Number(metadata.ino()));
    report.add("born", "born", time(metadata.created()));
    report.add("modified", "modified", time(metadata.modified()));
    report
}

fn time(time: io::Result<std::time::SystemTime>) -> Value {
    let since = time.ok().and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
    since.map_or(Value::Unknown, |since| {
        let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
        let Date { year, month, day } = date(days);
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        let nanos = since.subsec_nanos();
        Value::Text(format!("{year}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{nanos:09}Z"))
    })
}

/// A date of the Gregorian calendar; month and day are counted from 1.
struct Date {
    year: u64,
    month: u64,
    day: u64,
}

/// The date of a day, counted from the first of January 1970.
fn date(days: u64) -> Date {
    let is_leap = |year: u64| year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    // 400 years have 146,097 days; the rest is counted year by year and month by month.
    let (mut year, mut left) = (1970 + days / 146_097 * 400, days % 146_097);
    while left >= 365 + u64::from(is_leap(year)) {
        left -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let mut month = 0;
    let months = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    while left >= months[month] {
        left -= months[month];
        month += 1;
    }
    Date { year, month: month as u64 + 1, day: left + 1 }
}

fn mechanism(file: &quinion::File, plain: &fs::File) -> Report {
    let mut report = Report::new();
    report.add("mechanism", "mechanism", Value::Text(file.mechanism().to_owned()));
    report.add("direct", "past the kernel's cache", Value::Truth(file.is_direct()));
    let direct = rustix::fs::statx(plain, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    let (position, memory) = match direct {
        Ok(stat) if stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => {
            (Value::Bytes(stat.stx_dio_offset_align.into()), Value::Bytes(stat.stx_dio_mem_align.into()))
        }
        _ => (Value::Unknown, Value::Unknown),
    };
    report.add("direct_align_bytes", "direct read offset align", position);
    report.add("direct_memory_align_bytes", "direct read memory align", memory);
    report
}

fn kernel(kept: Option<Residency>, pages: u64) -> Report {
    let number = |number: Option<u64>| number.map_or(Value::Unknown, Value::Number);
    // The file may have grown since its size was asked for; a share is never above one.
    let share =
        kept.map_or(Value::Unknown, |kept| Value::Share { part: kept.pages.min(pages), whole: pages });
    let mut report = Report::new();
    report.add("resident", "resident", share);
    report.add("resident_pages", "pages", number(kept.map(|kept| kept.pages)));
    report.add("dirty_pages", "dirty pages", number(kept.and_then(|kept| kept.dirty_pages)));
    let method = kept.map_or(Value::Unknown, |kept| Value::Text(kept.method.to_owned()));
    report.add("method", "method", method);
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_never_above_one() {
        let kept = Residency { pages: 5, dirty_pages: None, method: "cachestat" };
        let printed = kernel(Some(kept), 4).printed(Form::Json);
        assert!(
            printed.starts_with("{\"resident\":1.0000,\"resident_pages\":5,\"dirty_pages\":null"),
            "{printed}"
        );
    }

    #[test]
    fn times_are_dates_with_nanoseconds() {
        let cases = [
            (0, 0, "1970-01-01T00:00:00.000000000Z"),
            (951_782_400, 1, "2000-02-29T00:00:00.000000001Z"),
            (1_795_793_523, 48_226_637, "2026-11-27T15:32:03.048226637Z"),
            (4_102_444_799, 999_999_999, "2099-12-31T23:59:59.999999999Z"),
            (13_574_563_200, 0, "2400-02-29T00:00:00.000000000Z"),
        ];
        for (seconds, nanos, expected) in cases {
            let at = std::time::UNIX_EPOCH + std::time::Duration::new(seconds, nanos);
            assert_eq!(time(Ok(at)), Value::Text(expected.into()));
        }
    }

    #[test]
    fn unknown_values_are_shown_as_unknown() {
        assert!(kernel(None, 4).printed(Form::Text).lines().all(|line| line.ends_with("unknown")));
        assert_eq!(time(Err(io::Error::other("no birth time here"))), Value::Unknown);
    }
}

//! Run notes: the sentences of a report on why nothing was served, or little, and what can be done about it.
//!
//! ```text
//!   no process attached ---> what may be the cause
//!   nothing was served ----> copied, and not used yet?  that
//!                            a known file was left?     the largest, and why
//!                            else                       the reasons for which descriptors were left, counted
//!   little was served -----> the same of what was left
//!   memory is too small; the cache has ended; it served other runs: a note each
//! ```
//!
//! A reason that more reads would remove (`Reason::Left`) is not given where a file is known that they would not help.
//!
//! Invariant: nothing here waits for a file system. One that hangs costs the size of a file.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use quinion::internals::arena::Validation;
use quinion::internals::arena::control::Reason;
use quinion::internals::lease::NoLease;
use quinion_owner::Shortage;
use quinion_owner::internals::serve::FileMode;
use quinion_size as size;
use rustix::process::{Resource, getrlimit};

use crate::run_numbers::{KeptRunNumbers, RunReport, counted, words};
use crate::{Intercept, RunEnd};

/// Fewer bytes than that are few.
const FEW_BYTES: u64 = 64 << 10;
/// A file that is served at once pays for the request after so many reads of it.
const PAYS_AFTER_READS: u64 = 32;
const SIZES_MAX: Duration = Duration::from_millis(200);

/// The notes of a report, the weightiest first.
pub fn notes_of(report: &RunReport<'_>) -> Vec<String> {
    let mut notes = Vec::from_iter(report.kind.note());
    notes.extend(why_unattached(report, notes.is_empty()));
    match report.totals.bytes {
        0 => notes.extend(why_nothing(report)),
        _ => notes.extend(why_little(report)),
    }
    notes.extend(shortage(report));
    notes.extend(report.kept.iter().flat_map(about_kept));
    notes
}

fn why_unattached(report: &RunReport<'_>, is_startable: bool) -> Option<String> {
    let is_known = report.kept.is_none_or(|kept| kept.is_known);
    if super::PRELOAD.is_empty() {
        Some("nothing was served: programs are served on x86-64 Linux with the GNU C library only".into())
    } else if report.intercept.how == Intercept::Off {
        Some("nothing was served: `--intercept off` leaves the program as it is".into())
    } else if is_startable
        && is_known
        && !report.kept.is_some_and(|kept| kept.has_ended)
        && report.totals.viewers == 0
        && !matches!(report.ended, RunEnd::Status(126 | 127))
    {
        Some(unattached(getrlimit(Resource::As).current))
    } else {
        None
    }
}

/// `limit`: the limit of this process's addresses, which its programs inherit.
fn unattached(limit: Option<u64>) -> String {
    let addresses = match limit {
        Some(limit) => format!(
            "a process whose addresses are limited is not served, and the limit is {} here (`ulimit -v`): start \
             `quinion run` without it; or the program",
            size::shown(limit)
        ),
        None => "it may limit its addresses (`ulimit -v`), or".to_owned(),
    };
    format!(
        "nothing was served: the program did not attach; {addresses} may clear its environment, or run in another \
         mount name space, or its dynamic linker refused the preload object (as one of an older C library does) and \
         said so on standard error"
    )
}

fn why_nothing(report: &RunReport<'_>) -> Vec<String> {
    let mut causes: Vec<String> = copied(report).into_iter().collect();
    causes.extend(largest_left(report).map(|left| left.describe()));
    let listed = if causes.is_empty() { Listed::IfAlone } else { Listed::Beside };
    causes.extend(left_descriptors(report, listed));
    if let Some(first) = causes.first_mut() {
        first.insert_str(0, "nothing was served; ");
    }
    causes
}

/// Why a part of the reads was the kernel's, if that part is the larger one as far as is known.
fn why_little(report: &RunReport<'_>) -> Option<String> {
    let totals = &report.totals;
    if let Some(left) = largest_left(report).filter(|left| left.bytes > totals.bytes) {
        return Some(left.describe());
    }
    let (listed, heading) = match totals.bytes {
        _ if totals.kernel_reads > totals.reads => {
            (Listed::IfAlone, "most reads were the kernel's".to_owned())
        }
        ..FEW_BYTES => (Listed::All, format!("no more than {} were served", size::shown(totals.bytes))),
        _ => return None,
    };
    left_descriptors(report, listed).map(|listed| format!("{heading}; {listed}"))
}

/// The cache has read something, and no program has opened a file after that.
fn copied(report: &RunReport<'_>) -> Option<String> {
    let bytes = report.owner.device_bytes;
    if bytes == 0 || report.totals.files > 0 || report.kept.is_some_and(|kept| kept.others > 0) {
        return None;
    }
    let bytes = size::shown(bytes);
    Some(match report.kept {
        Some(kept) => {
            let later = if kept.has_ended { "they left with it" } else { "the next run finds them there" };
            format!(
                "{bytes} were copied into the cache in the background, and the program or the cache ended before they \
                 could be used; {later}"
            )
        }
        None => {
            let files = report.modes.iter().filter(|mode| mode.validation != Validation::Kernel).count();
            if files == 0 {
                return None; // a writer took it back
            }
            format!(
                "{bytes} of {} were copied into the cache in the background, and the program ended before it could \
                 use them; `--keep` keeps them for the next run",
                counted(files as u64, "file", "files")
            )
        }
    })
}

/// A file that was left to the kernel, and that further reads would not have served.
struct LeftFile {
    file: FileMode,
    /// 0 if that is not known.
    bytes: u64,
    /// Number of other files that were left for the same reason.
    others: usize,
}

/// The largest of them. A kept cache knows files of other runs, too, so none is named there.
fn largest_left(report: &RunReport<'_>) -> Option<LeftFile> {
    if report.kept.is_some() {
        return None;
    }
    let for_memory = |mode: &&FileMode| report.owner.shortage.files > 0 && mode.why.starts_with("--memory");
    let left = report.modes.iter().filter(|mode| mode.validation == Validation::Kernel);
    let left: Vec<&FileMode> = left.filter(|mode| !for_memory(mode)).collect(); // that has a note of its own
    let sizes = sizes_of(left.iter().map(|mode| mode.path.clone()).collect());
    let largest = (0..left.len()).max_by_key(|&place| sizes.get(place))?;
    let bytes = sizes.get(largest).copied().unwrap_or(0);
    let others = left.iter().filter(|mode| mode.why == left[largest].why).count() - 1;
    Some(LeftFile { file: left[largest].clone(), bytes, others })
}

/// The sizes of files; none if a file system keeps them for long.
fn sizes_of(paths: Vec<PathBuf>) -> Vec<u64> {
    let (send, receive) = mpsc::channel();
    let measure = move || {
        let sizes = paths.iter().map(|path| path.metadata().map_or(0, |metadata| metadata.len()));
        let _ = send.send(sizes.collect()); // it may be too late
    };
    let started = std::thread::Builder::new().name("quinion-sizes".into()).spawn(measure);
    started.ok().and_then(|_| receive.recv_timeout(SIZES_MAX).ok()).unwrap_or_default()
}

impl LeftFile {
    fn describe(&self) -> String {
        let Self { file: FileMode { path, why, .. }, bytes, others } = self;
        let bytes = if *bytes > 0 { format!(" ({})", size::shown(*bytes)) } else { String::new() };
        let others = match others {
            0 => String::new(),
            _ => format!(", as {}", counted(*others as u64, "other file was", "other files were")),
        };
        let remedy = if *why == NoLease::NotPermitted.to_string() {
            ", or with `--immutable FOLDER` if it never changes"
        } else {
            ""
        };
        format!("{}{bytes} was left to the kernel{others}: {why}{remedy}", path.display())
    }
}

/// Which reasons are listed. Two are in nearly every run: the loader maps libraries, and programs have pipes and
/// terminals.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Listed {
    /// Also these two: something was served, so they may be the reason why it is little.
    All,
    /// The two reasons only if there is no other.
    IfAlone,
    /// Not these two, nor that a file was read too few times: a better cause was found for that.
    Beside,
}

/// The counted reasons for which descriptors were left, the commonest first.
fn left_descriptors(report: &RunReport<'_>, listed: Listed) -> Option<String> {
    let shortage = &report.owner.shortage;
    let mut reasons: Vec<(u64, Reason)> = Reason::ALL
        .iter()
        .map(|&reason| (report.totals.reasons[reason as usize], reason))
        .filter(|&(count, reason)| count > 0 && (listed != Listed::Beside || reason != Reason::Left))
        .collect();
    let is_telling = |&(_, reason): &(u64, Reason)| !matches!(reason, Reason::Mapped | Reason::NotRegular);
    if listed == Listed::Beside || listed == Listed::IfAlone && reasons.iter().any(is_telling) {
        reasons.retain(is_telling);
    }
    reasons.sort_by_key(|&(count, _)| std::cmp::Reverse(count));
    reasons.first()?;
    let has = |wanted: Reason| reasons.iter().any(|&(_, reason)| reason == wanted);
    let mut remedies = String::new();
    if has(Reason::Left) {
        let left = report.totals.reasons[Reason::Left as usize];
        let pays = report.totals.kernel_reads >= left.saturating_mul(PAYS_AFTER_READS);
        remedies += &copy_rule(pays, leases_files_of_others());
    }
    if has(Reason::Unguaranteed) {
        remedies += "; files without a lease are served by `--immutable FOLDER` if they never change, or by \
                     `--file-systems all` with `--coherence times`";
    }
    if listed == Listed::All && has(Reason::Mapped) {
        remedies += "; what is mapped is the kernel's in any case";
    }
    let reasons: Vec<String> =
        reasons.iter().map(|&(count, reason)| format!("{count} {}", words(reason, shortage))).collect();
    Some(format!("descriptors were left to the kernel: {}{remedies}", reasons.join(", ")))
}

/// When files are copied, and what serves them earlier: only if that pays, and is allowed.
fn copy_rule(pays: bool, leases_all: bool) -> String {
    let mut rule = "; a file of 4 MiB or more is copied into the cache, in the background, when it is read after it \
                    was opened for the third time, a smaller one when reads by one descriptor have come to 256 \
                    KiB and to more than its size, and then to twice its size"
        .to_owned();
    if pays {
        rule += "; `--attach at-once` serves every file at its first read, for programs that open few files and read \
                 them long";
    }
    if !leases_all {
        rule += "; files of other users are served by `--immutable FOLDER` alone";
    }
    rule
}

/// Whether this process may take a lease on a file of another user. In a user name space of its own it may not, since
/// the kernel asks for its rights in the first name space.
pub fn leases_files_of_others() -> bool {
    const FIRST_NAME_SPACE: &str = "user:[4026531837]";
    let is_first =
        std::fs::read_link("/proc/self/ns/user").is_ok_and(|name| name == Path::new(FIRST_NAME_SPACE));
    is_first && std::fs::read_to_string("/proc/self/status").is_ok_and(|status| has_lease_right(&status))
}

fn has_lease_right(status: &str) -> bool {
    const CAP_LEASE: u32 = 28;
    let rights = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let rights = rights.and_then(|rights| u64::from_str_radix(rights.trim(), 16).ok());
    rights.is_some_and(|rights| rights >> CAP_LEASE & 1 == 1)
}

fn shortage(report: &RunReport<'_>) -> Option<String> {
    let Shortage { files: files @ 1.., bytes, memory } = report.owner.shortage else { return None };
    Some(format!(
        "{} of {} left to the kernel for want of memory: `--memory {}` would have held all that was read",
        counted(files, "file", "files"),
        size::shown(bytes),
        size::Size::Bytes(report.stats.bound_bytes).rounded_up(memory)
    ))
}

fn about_kept(kept: &KeptRunNumbers<'_>) -> Vec<String> {
    let KeptRunNumbers { name, others, is_known, has_ended } = kept;
    let cause = match has_ended {
        true => format!("the cache `{name}` ended before the program did, without a report"),
        false => format!("the cache `{name}` does not answer; `quinion stop {name}` ends it"),
    };
    let unknown = (!is_known).then(|| format!("what was served is not known: {cause}"));
    let shared = (*others > 0).then(|| {
        "the cache served other runs at the same time: the numbers for device, readahead and evicted include theirs"
            .to_owned()
    });
    unknown.into_iter().chain(shared).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_did_not_attach_may_have_limited_addresses() {
        let limited = unattached(Some(2_000_000 << 10));
        assert!(limited.contains("the limit is 1.9 GiB here (`ulimit -v`)"), "{limited}");
        assert!(limited.find("ulimit") < limited.find("environment"), "{limited}");
        assert!(unattached(None).contains("may limit its addresses (`ulimit -v`)"));
    }

    #[test]
    fn the_right_to_lease_files_of_others_is_read() {
        for (rights, has) in [("000001ffffffffff", true), ("0000000010000000", true), ("0", false)] {
            assert_eq!(has_lease_right(&format!("Name:\tx\nCapEff:\t{rights}\n")), has, "{rights}");
        }
        assert!(!has_lease_right(""));
    }

    #[test]
    fn a_remedy_that_cannot_help_is_not_given() {
        assert!(copy_rule(true, true).contains("at-once") && !copy_rule(false, true).contains("at-once"));
        assert!(
            copy_rule(false, false).contains("--immutable") && !copy_rule(true, true).contains("--immutable")
        );
    }
}

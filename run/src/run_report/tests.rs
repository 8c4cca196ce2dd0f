//! Tests of the report's lines, its JSON and its notes.
//!
//! Each makes a report of numbers alone: no program runs, and no owner. One number or file is set, and the sentences
//! that it makes are compared.

use quinion::internals::arena::ArenaStats;
use quinion_owner::internals::serve::FileMode;

use crate::Kind;
use crate::keep::Name;
use crate::run_numbers::{Interception, OwnerNumbers};

use super::*;

const ALONE: Interception = Interception { how: Intercept::Plt, planned: None };

/// The report of a run of one process, of which all numbers are 0.
fn plain<'a>() -> RunReport<'a> {
    RunReport {
        program: &[],
        ended: RunEnd::Status(0),
        kind: &Kind::Served,
        intercept: &ALONE,
        totals: ViewerTotals { viewers: 1, ..ViewerTotals::default() },
        stats: ArenaStats { bound_bytes: 64 << 20, ..ArenaStats::default() },
        owner: OwnerNumbers::default(),
        modes: Vec::new(),
        kept: None,
    }
}

#[test]
fn one_of_a_kind_is_in_the_singular_and_served_files_are_counted_by_their_opens() {
    let mut report = plain();
    (report.totals.reads, report.totals.bytes, report.totals.files) = (1, 9, 1);
    (report.totals.kernel_reads, report.owner.device_reads) = (1, 1);
    (report.owner.evicted_pages, report.owner.readahead.pages) = (1, 1);
    let text = report.text();
    for words in [
        "served     9 bytes in 1 read of 1 open, 1 process",
        "hits       1 of 1 read; 0 reads",
        "device     0 bytes in 1 read\n",
        "kernel     1 read\n",
        "evicted    1 page;",
        "readahead  1 page read",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

fn left_to_kernel(path: &Path, why: &str) -> FileMode {
    FileMode { path: path.to_owned(), validation: Validation::Kernel, why: why.to_owned() }
}

#[test]
fn the_note_names_a_reason_that_a_user_can_act_on() {
    let mut report = plain();
    let note = |report: &RunReport<'_>| report.notes().into_iter().next().expect("a note");
    assert_eq!(report.notes(), Vec::<String>::new());
    report.totals.reasons[Reason::Mapped as usize] = 13;
    assert!(note(&report).ends_with("13 mapped"), "{}", note(&report));
    report.totals.reasons[Reason::Left as usize] = 2;
    report.totals.reasons[Reason::NotRegular as usize] = 1;
    report.totals.kernel_reads = 64;
    let said = note(&report);
    assert!(said.contains(": 2 read too few times") && said.contains("`--attach at-once`"), "{said}");
    assert!(!said.contains("mapped") && !said.contains("regular") && !said.contains("--memory"), "{said}");
    report.totals.kernel_reads = 63;
    assert!(!note(&report).contains("at-once"), "few reads of each: {}", note(&report));
    report.owner.shortage = Shortage { files: 1, bytes: 9, memory: 36 };
    let said = note(&report);
    assert!(said.contains(": 2 read too few times to be copied yet, or too large for --memory"), "{said}");
    report.owner.shortage = Shortage::default();
    report.totals.reasons[Reason::Writable as usize] = 3;
    assert!(note(&report).contains(": 3 open for writing"), "{}", note(&report));
}

#[test]
fn a_file_that_was_copied_too_late_was_not_read_too_few_times() {
    let mut report = plain();
    report.totals.reasons[Reason::Left as usize] = 6;
    report.owner.device_bytes = 2 << 20;
    report.modes = vec![FileMode { validation: Validation::Leased, ..left_to_kernel(Path::new("/f"), "") }];
    let notes = report.notes();
    assert_eq!(notes.len(), 1, "{notes:?}");
    assert!(notes[0].contains("2.0 MiB of 1 file were copied") && notes[0].contains("`--keep`"), "{notes:?}");
    report.totals.files = 1;
    assert!(!report.notes()[0].contains("copied into the cache in"), "it was opened: {notes:?}");
}

#[test]
fn a_file_that_cannot_be_served_is_named_with_its_cause_whether_nothing_or_little_was_served() {
    let folder = tempfile::tempdir().expect("a folder");
    let [large, small] = ["large", "small"].map(|name| folder.path().join(name));
    std::fs::write(&large, vec![1; 5 << 20]).expect("the disk has room");
    std::fs::write(&small, [1]).expect("the disk has room");
    let mut report = plain();
    report.totals.reasons[Reason::Left as usize] = 15;
    let why = "the file is another user's; run as its owner, or with CAP_LEASE";
    report.modes = vec![
        left_to_kernel(&small, why),
        left_to_kernel(&large, why),
        left_to_kernel(&small, "another cause"),
    ];
    let notes = report.notes();
    let expected = format!(
        "{} (5.0 MiB) was left to the kernel, as 1 other file was: {why}, or with `--immutable FOLDER`",
        large.display()
    );
    assert!(notes.len() == 1 && notes[0].contains(&expected) && !notes[0].contains("at-once"), "{notes:?}");
    (report.totals.bytes, report.totals.reads, report.totals.files) = (2996, 1, 1);
    let notes = report.notes();
    assert!(notes.len() == 1 && notes[0].starts_with(&expected), "little was served: {notes:?}");
    report.totals.bytes = 6 << 20;
    assert_eq!(report.notes(), Vec::<String>::new(), "more was served");
}

#[test]
fn where_little_was_served_the_reasons_are_given() {
    let mut report = plain();
    (report.totals.bytes, report.totals.reads) = (2996, 1);
    report.totals.reasons[Reason::Mapped as usize] = 13;
    let text = report.text();
    let note = "note       no more than 2.9 KiB were served; descriptors were left to the kernel: 13 mapped; what is \
                mapped is the kernel's in any case\n";
    assert!(text.ends_with(note), "{text}");
    report.totals.reasons[Reason::Duplicated as usize] = 1;
    assert!(report.notes()[0].contains(": 13 mapped, 1 duplicated; what is"), "{:?}", report.notes());
    report.totals.bytes = 1 << 30;
    assert_eq!(report.notes(), Vec::<String>::new());
    (report.totals.kernel_reads, report.totals.reasons[Reason::Foreign as usize]) = (2, 1);
    let note =
        "most reads were the kernel's; descriptors were left to the kernel: 1 duplicated, 1 opened before";
    assert!(report.notes()[0].starts_with(note), "{:?}", report.notes());
}

/// A descriptor on another file system is not asked for, so its file's name is not known.
#[test]
fn where_most_is_on_another_file_system_the_options_that_serve_it_are_named() {
    let mut report = plain();
    (report.totals.bytes, report.totals.reads, report.totals.kernel_reads) = (2996, 1, 240);
    report.totals.reasons[Reason::Unguaranteed as usize] = 1;
    let notes = report.notes();
    assert!(
        notes[0].contains("`--immutable FOLDER`") && notes[0].contains("`--file-systems all`"),
        "{notes:?}"
    );
}

#[test]
fn a_kept_cache_that_has_ended_is_not_there_for_the_next_run() {
    let (mut report, name) = (plain(), Name::default());
    let kept = KeptRunNumbers { name: &name, others: 0, is_known: true, has_ended: false };
    report.kept = Some(kept);
    assert!(
        report.text().contains("kept       as `default`, for the next run; `quinion stop default` ends it\n")
    );
    assert!(report.json().contains("\"ended\":false"), "{}", report.json());
    for is_known in [true, false] {
        report.kept = Some(KeptRunNumbers { is_known, has_ended: true, ..kept });
        let text = report.text();
        assert!(text.contains("the cache `default` ended during the run; reads after that were"), "{text}");
        assert!(!text.contains("quinion stop") && report.json().contains("\"ended\":true"), "{text}");
    }
    report.kept = Some(KeptRunNumbers { is_known: false, ..kept });
    assert!(report.text().contains("does not answer; `quinion stop default`"), "{}", report.text());
}

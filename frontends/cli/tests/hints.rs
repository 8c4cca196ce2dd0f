//! Hints of programs: pages that a program under `run` announces are cached afterwards, and pages that it gives up are
//! not. Checked by the cached pages, not by served bytes.
//!
//! ```text
//!   programs/hints.c CASE --alone--------> what each call answered, a digest of what was read
//!                         --under `run`--> the same; and while it still has the file open, and after it has ended,
//!                                          the pages of the file that the cache has are those expected, no others
//! ```
//!
//! The cache reads nothing ahead and has folios of one page, so that each page in it was asked for by itself. Each case
//! runs by names alone and with the C library patched.
//!
//! Not an invariant: when a hint is followed. No program waits for that, so the test looks again until the pages are
//! those expected, and fails if a minute was not enough.

use std::io::{BufRead, BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use quinion::{Cache, File, PageState, Stats};
use quinion_owner::CacheOwner;
use quinion_owner::internals::serve::ViewerTotals;
use quinion_run::{LINKER, Session, plan_for};

const PAGE: u64 = 4096;
/// Pages of the file; its last one is not full.
const PAGES: u64 = 300;
const FILE_BYTES: u64 = (PAGES - 1) * PAGE + 1234;
/// The pages that a hint of a part of the file names, in `programs/hints.c`.
const PART: Range<u64> = 50..150;

fn program() -> &'static Path {
    static BUILT: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, program) = BUILT.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let program = folder.path().join("hints");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/hints.c");
        let status = Command::new("cc").args(["-O2", "-w", "-o"]).arg(&program).arg(&source).status();
        assert!(status.expect("a C compiler named cc").success());
        (folder, program)
    });
    program
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Names,
    Patched,
}

#[derive(Debug)]
struct Outcome {
    printed: String,
    totals: ViewerTotals,
    stats: Stats,
}

fn file() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let path = folder.path().join("file");
    let bytes: Vec<u8> = (0..FILE_BYTES).map(|at| (at / 7) as u8 ^ (at >> 12) as u8).collect();
    std::fs::write(&path, bytes).expect("the disk has room");
    (folder, path)
}

fn printed_alone(case: &str, path: &Path) -> String {
    let output =
        Command::new(program()).arg(case).arg(path).stdin(Stdio::null()).output().expect("it starts");
    assert!(output.status.success() && output.stderr.is_empty(), "{case}: {output:?}");
    String::from_utf8(output.stdout).expect("text")
}

fn cached(file: &File) -> Vec<Range<u64>> {
    let ranges = file.residents(0, u64::MAX).expect("not forked");
    let there = ranges.filter(|range| range.state == PageState::Cached);
    there.map(|range| range.bytes.start / PAGE..range.bytes.end.div_ceil(PAGE)).collect()
}

#[track_caller]
fn wait_until_cached(what: &str, file: &File, expected: &[Range<u64>]) {
    let began = Instant::now();
    while cached(file) != expected && began.elapsed() < Duration::from_secs(60) {
        std::thread::yield_now();
    }
    assert_eq!(cached(file), expected, "{what} (right: the pages expected)");
}

#[track_caller]
fn leaves_cached(case: &str, way: Way, expected: &[Range<u64>]) -> Outcome {
    let (_folder, path) = file();
    let alone = printed_alone(case, &path);
    let memory = Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).folio_order_max(0);
    let cache = memory.build().expect("a small cache");
    let ours = cache.open(&path).expect("it is there");
    assert_eq!(cached(&ours), [], "a cache that is new has nothing");
    let mut session = Session::start(Arc::new(CacheOwner::new(cache.clone()))).expect("a session");
    if way == Way::Patched {
        session.patch_by(&plan_for(Path::new(LINKER)).expect("a plan").bytes()).expect("a plan that fits");
    }
    let mut command = Command::new(program());
    command.arg(case).arg(&path).stdin(Stdio::piped()).stdout(Stdio::piped());
    session.point_to(&mut command);
    // 1 The program has printed that its case is done, and keeps the file open.
    let mut child = command.spawn().expect("it starts");
    let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut printed = String::new();
    while !printed.ends_with("done\n") && output.read_line(&mut printed).expect("text") > 0 {}
    wait_until_cached(&format!("{case}, {way:?}, open"), &ours, expected);
    // 2 It ends.
    drop(child.stdin.take());
    output.read_to_string(&mut printed).expect("text");
    assert!(child.wait().expect("it is ours").success(), "{case}: {printed}");
    let totals = session.stop();
    wait_until_cached(&format!("{case}, {way:?}, ended"), &ours, expected);
    assert_eq!(printed, alone, "{case}, {way:?} (right: without the cache)");
    // The one kernel read is that of the pipe that ends the program.
    assert!(totals.files == 1 && totals.kernel_reads <= 1, "{case}, {way:?}: {totals:?}");
    Outcome { printed, totals, stats: cache.stats() }
}

#[track_caller]
fn leaves_cached_both_ways(case: &str, expected: &[Range<u64>]) -> [Outcome; 2] {
    [Way::Names, Way::Patched].map(|way| leaves_cached(case, way, expected))
}

/// A case that announces pages and reads none of them: only the hint brings them in.
#[track_caller]
fn is_fetched(case: &str, expected: Range<u64>) {
    let pages = expected.end - expected.start;
    for outcome in leaves_cached_both_ways(case, std::slice::from_ref(&expected)) {
        assert_eq!(outcome.totals.bytes, 0, "the program read nothing: {outcome:?}");
        assert_eq!(outcome.stats.will_need_pages, pages, "{outcome:?}");
        assert_eq!(outcome.stats.device_bytes.div_ceil(PAGE), pages, "{outcome:?}");
    }
}

#[test]
fn pages_that_the_readahead_call_names_are_cached() {
    is_fetched("readahead", PART);
}

#[test]
fn pages_advised_as_willneed_are_cached() {
    is_fetched("willneed", PART);
    is_fetched("willneed-all", 0..PAGES);
}

/// The reference for the next tests: without a hint all pages stay.
#[test]
fn pages_read_without_a_hint_stay_cached() {
    for outcome in leaves_cached_both_ways("read", std::slice::from_ref(&(0..PAGES))) {
        assert_eq!(outcome.totals.bytes, FILE_BYTES, "{outcome:?}");
    }
}

/// A case that reads all of the file, and announces that it needs none of it again.
#[track_caller]
fn is_served_and_goes(case: &str) {
    for outcome in leaves_cached_both_ways(case, &[]) {
        assert_eq!(outcome.totals.bytes, FILE_BYTES, "{outcome:?}");
        assert_eq!(outcome.stats.device_bytes, FILE_BYTES, "each byte is read once: {outcome:?}");
    }
}

/// Like the kernel's, this hint evicts no page while there is room.
#[test]
fn pages_advised_as_noreuse_stay_while_memory_is_free() {
    for outcome in leaves_cached_both_ways("noreuse", std::slice::from_ref(&(0..PAGES))) {
        assert_eq!(outcome.totals.bytes, FILE_BYTES, "{outcome:?}");
        assert_eq!(outcome.stats.device_bytes, FILE_BYTES, "each byte is read once: {outcome:?}");
    }
}

#[test]
fn pages_read_with_dontcache_are_dropped() {
    let (_folder, path) = file();
    if printed_alone("dontcache", &path).starts_with("dontcache -") {
        eprintln!("SKIPPED: the kernel has no RWF_DONTCACHE for this file system");
        return;
    }
    is_served_and_goes("dontcache");
}

#[test]
fn pages_advised_as_dontneed_are_dropped_and_the_rest_stays() {
    let rest = [0..PART.start, PART.end..PAGES];
    for outcome in leaves_cached_both_ways("dontneed", &rest) {
        assert_eq!(outcome.stats.dropped_pages, PART.end - PART.start, "{outcome:?}");
    }
    for outcome in leaves_cached_both_ways("dontneed-all", &[]) {
        assert_eq!(outcome.stats.dropped_pages, PAGES, "{outcome:?}");
        assert!(outcome.printed.contains("dontneed-all 0 "), "{outcome:?}");
    }
}

//! Never wrong, also with programs whose own instructions enter the kernel (`programs/hostile.c`).
//!
//! ```text
//!   hostile CASE --alone--> its output        closes, reopens, seeks, writes behind the C library's back
//!                --under `run`--> the same, and positional reads were served
//! ```
//!
//! The files that are read belong to the system and are old, so that they may be served to such a program at all: a
//! file that changed a moment ago is not.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use quinion::Cache;
use quinion::internals::arena::control::{Reason, SyscallAudit};
use quinion_owner::CacheOwner;
use quinion_owner::internals::serve::ViewerTotals;
use quinion_run::Session;
use quinion_run::elf::Elf;
use quinion_run::syscall_scan::{self, Site};

struct Built {
    folder: tempfile::TempDir,
}

impl Built {
    fn hostile(&self) -> PathBuf {
        self.folder.path().join("hostile")
    }
    fn plain(&self, loaded: &str) -> PathBuf {
        self.folder.path().join(loaded).join("plain")
    }
}

fn compile(source: &str, to: &Path, words: &[&str]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(source);
    let mut command = Command::new("cc");
    command.args(["-O2", "-w", "-pthread", "-o"]).arg(to).arg(&source).args(words);
    assert!(command.status().expect("a C compiler named cc").success(), "{command:?}");
}

fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(|| {
        let built = Built { folder: tempfile::tempdir().unwrap() };
        // An old file that may be written: a source of these tests.
        let old = concat!("-DOLD=\"", env!("CARGO_MANIFEST_DIR"), "/tests/programs/rules.c\"");
        compile("hostile.c", &built.hostile(), &[old]);
        for (loaded, words) in [("foreign", &["-DLIBRARY"][..]), ("harmless", &["-DLIBRARY", "-DHARMLESS"])] {
            let folder = built.folder.path().join(loaded);
            std::fs::create_dir(&folder).unwrap();
            let words: Vec<&str> = [words, &["-shared", "-fPIC"]].concat();
            compile("hostile.c", &folder.join("libloaded.so"), &words);
            compile(
                "hostile.c",
                &folder.join("plain"),
                &["-DPLAIN", "-rdynamic", "-Wl,-rpath,$ORIGIN", "-ldl"],
            );
        }
        built
    })
}

/// Two files of the system, of which one is longer than the other and both have some hundred KiB.
fn old_files() -> [PathBuf; 2] {
    let interpreter = Elf::open(Path::new("/bin/sh")).unwrap().interpreter().unwrap();
    let interpreter = std::fs::canonicalize(interpreter).unwrap();
    [interpreter.with_file_name("libc.so.6"), interpreter]
}

fn output(mut command: Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    assert!(output.stderr.is_empty(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn same_with_and_without(program: &Path, case: &str) -> ViewerTotals {
    let folder = tempfile::tempdir().unwrap();
    let command = |name: &str| {
        let scratch = folder.path().join(name);
        let bytes: Vec<u8> = (0..60_000u32).map(|at| (at * 7 + at / 256) as u8).collect();
        std::fs::write(&scratch, bytes).unwrap();
        let mut command = Command::new(program);
        command.arg(case).args(old_files()).arg(scratch).stdin(std::process::Stdio::null());
        command
    };
    let expected = output(command("without"));
    assert!(expected.contains(case), "{expected}");
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let session = Session::start(Arc::new(CacheOwner::new(cache))).unwrap();
    let mut served = command("with");
    session.point_to(&mut served);
    assert_eq!(output(served), expected, "{case} differs (right: without the cache)");
    assert_eq!(
        std::fs::read(folder.path().join("with")).unwrap(),
        std::fs::read(folder.path().join("without")).unwrap()
    );
    let totals = session.stop();
    assert!(totals.viewers > 0, "{case} did not attach");
    totals
}

fn is_restricted(totals: &ViewerTotals) -> bool {
    totals.reasons[Reason::Restricted as usize] > 0
}

/// 1. A program opens a file and reads some of it.
/// 2. It closes the descriptor and opens another file, which gets the same number, by instructions of its own.
/// 3. Its next read by the C library is served from the file of step 1.
#[test]
fn a_number_that_changes_hands_unseen_is_never_read_from_the_wrong_file() {
    let totals = same_with_and_without(&built().hostile(), "reopen");
    assert!(totals.reads > 100 && is_restricted(&totals), "{totals:?}");
}

#[test]
fn an_offset_that_moves_unseen_is_the_kernels() {
    let totals = same_with_and_without(&built().hostile(), "offset");
    assert!(totals.reads > 50 && is_restricted(&totals), "{totals:?}");
}

#[test]
fn a_description_that_cannot_read_reads_nothing() {
    same_with_and_without(&built().hostile(), "writeonly");
}

#[test]
fn a_descriptor_that_may_write_is_the_kernels() {
    let totals = same_with_and_without(&built().hostile(), "readwrite");
    assert!(totals.reads == 0 && totals.reasons[Reason::Writable as usize] > 0, "{totals:?}");
}

#[test]
fn an_unseen_write_is_read_at_once() {
    same_with_and_without(&built().hostile(), "written");
}

#[test]
fn a_read_beside_an_exchange_is_of_one_of_both_files() {
    same_with_and_without(&built().hostile(), "threads");
}

#[test]
fn an_object_that_is_loaded_later_is_looked_at_before_it_can_run() {
    let totals = same_with_and_without(&built().plain("foreign"), "load");
    assert!(totals.reads > 2 && is_restricted(&totals), "{totals:?}");
}

#[test]
fn a_harmless_object_changes_nothing() {
    let totals = same_with_and_without(&built().plain("harmless"), "load");
    assert!(totals.reads > 160 && !is_restricted(&totals), "{totals:?}");
}

// ---- the scan ----------------------------------------------------------------------------------------------

fn scan_of(words: &[&str]) -> Vec<Site> {
    let folder = tempfile::tempdir().unwrap();
    let object = folder.path().join("calls.so");
    compile("calls.S", &object, &[&["-shared", "-nostdlib"], words].concat());
    syscall_scan::scan(&std::fs::read(object).unwrap()).unwrap()
}

fn numbers(words: &[&str]) -> Vec<Option<u32>> {
    scan_of(words).iter().map(|site| site.number).collect()
}

#[test]
fn numbers_are_read_from_the_code_when_only_one_can_be_meant() {
    assert_eq!(numbers(&["-DPLAIN"]), [Some(186)]);
    assert_eq!(numbers(&["-DZERO"]), [Some(0)]);
    assert_eq!(numbers(&["-DTWO"]), [Some(202), Some(426)]);
}

#[test]
fn a_number_that_could_be_another_is_not_believed() {
    for way in
        ["-DREGISTER", "-DJUMPED_OVER", "-DJUMPED_FROM_ELSEWHERE", "-DTABLE", "-DCALLED_BETWEEN", "-DPART"]
    {
        assert_eq!(numbers(&[way]), [None], "{way}");
    }
}

/// 1. An object's code begins with a function without unwind information.
/// 2. In it a load's offset has the two bytes of a system call, with few bytes of code before it.
/// 3. The scan takes them for a system call, since there is too little code to decide, and serves the whole process in
///    the restricted mode.
#[test]
fn bytes_like_a_call_where_no_code_leads_are_no_call() {
    assert_eq!(numbers(&["-DFIRST"]), []);
    assert_eq!(numbers(&["-DFIRST", "-DPLAIN"]), [Some(186)]);
}

/// 1. An object closes a descriptor by a system call with a meaningless prefix.
/// 2. The pair of bytes does not begin an instruction, so the scan takes it for part of another one.
/// 3. The object passes as clean, and its call is not noticed.
#[test]
fn a_call_behind_prefixes_is_one() {
    assert_eq!(numbers(&["-DPREFIXES"]), [Some(3), Some(186)]);
    assert_eq!(numbers(&["-DCODE_BETWEEN_FUNCTIONS", "-DPREFIXED"]), [None]);
}

#[test]
fn bytes_that_only_look_like_a_call_do_not_count_and_possible_calls_do() {
    assert_eq!(numbers(&["-DINSIDE"]), []);
    assert_eq!(numbers(&["-DDATA_BETWEEN_FUNCTIONS"]), []);
    assert_eq!(numbers(&["-DCODE_BETWEEN_FUNCTIONS"]), [None]);
    assert_eq!(numbers(&["-DNO_UNWINDING"]), [None]);
    assert_eq!(numbers(&["-DOLD_GATE"]), [None]);
}

#[test]
fn programs_everybody_has_are_clean_and_the_c_library_is_not() {
    for program in ["/bin/cat", "/bin/sh", "/usr/bin/git"] {
        let Ok(bytes) = std::fs::read(program) else { continue };
        assert_eq!(
            syscall_scan::scan(&bytes).map(|sites| syscall_scan::audit_of(&sites)),
            Ok(SyscallAudit::Clean),
            "{program}"
        );
    }
    // Full of tables that are not code.
    let ciphers = old_files()[0].with_file_name("libcrypto.so.3");
    if let Ok(bytes) = std::fs::read(ciphers) {
        assert_eq!(syscall_scan::scan(&bytes), Ok(vec![]));
    }
    let sites = syscall_scan::scan(&std::fs::read(&old_files()[0]).unwrap()).unwrap();
    let known = sites.iter().filter(|site| site.number.is_some()).count();
    assert!(sites.len() > 300 && known > 200, "{known} of {}", sites.len());
    assert_eq!(syscall_scan::audit_of(&sites), SyscallAudit::Restricted);
}

#[test]
fn fio_enters_the_kernel_for_its_rings_alone() {
    let Ok(bytes) = std::fs::read("/usr/bin/fio") else { return println!("SKIPPED: fio is not installed") };
    let sites = syscall_scan::scan(&bytes).unwrap();
    assert_eq!(syscall_scan::audit_of(&sites), SyscallAudit::Harmless, "{sites:?}");
}

#[test]
fn a_file_that_is_no_object_is_an_error_and_never_a_panic() {
    assert!(syscall_scan::scan(b"#!/bin/sh\n").is_err());
    let whole = std::fs::read("/bin/cat").unwrap();
    let mut state = 1u64;
    for _ in 0..300 {
        let mut bytes = whole.clone();
        for _ in 0..8 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let at = (state >> 33) as usize % bytes.len();
            bytes[at] = (state >> 24) as u8;
        }
        let _ = syscall_scan::scan(&bytes);
        let _ = syscall_scan::scan(&bytes[..(state >> 20) as usize % whole.len()]);
    }
}
